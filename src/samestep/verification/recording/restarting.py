"""A rank that is killed while it trains, and whether its script can go on from what it has saved."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from samestep.instrument.patch import is_own
from samestep.verification.journal import TraceWriter

_MAX_LOOKS = 1000  # looks for a checkpoint: 20 s
_LOADS = ("load_state_dict(", "torch.load(", "load_checkpoint(")


def kill(journal: TraceWriter) -> None:
    """Kills this process, as kill -9 does."""
    journal.write("killed")
    os.kill(os.getpid(), signal.SIGKILL)


def kill_once_saved(saves: Path, journal: TraceWriter) -> None:
    """Kills this process, as kill -9 does, when a checkpoint is there; waits a while for one that is being saved."""
    for _ in range(_MAX_LOOKS):
        if any(saves.glob("*/step-*")):
            kill(journal)
        time.sleep(0.02)


def may_load() -> bool:
    """Returns whether the user's code has a call that brings a saved state back."""
    files = {str(getattr(module, "__file__", None)) for module in [*sys.modules.values()]}
    own = [Path(file) for file in files if file.endswith(".py") and is_own(file)]
    texts = (file.read_text(errors="replace") for file in own if file.is_file())  # torch has modules without one
    return any(call in text for text in texts for call in _LOADS)
