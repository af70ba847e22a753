"""How tasks that srun or mpiexec has started find the one among them that leads: through a file.

    task 0           binds a port, and puts {addresses, port, token} where all can read it, in one rename
    the others       look for it until it is there

A file system is the only thing that these tasks share for certain before they are connected, and on one that spans
hosts there is nothing to wait on: so they look, less and less often. The file bears the job's and the step's number
and the restart count; a leftover of an earlier job of the same number is told by its age.
"""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

from samestep.errors import RendezvousError
from samestep.paths import meeting_file
from samestep.rankenv import RankVariables, variable

__all__: list[str] = []

SOONEST, LATEST = 0.01, 0.5  # seconds between two looks
STALE = 600.0  # seconds; tasks of one step start within this


def place_for(told: RankVariables) -> Path:
    """Returns the file of this step: private to this host where the step is, else in the working directory."""
    if told.one_host:
        return meeting_file(f"{told.job}-head" if told.job else None)
    job = re.sub(r"[^\w.-]+", "-", told.job or "job")
    return Path.cwd() / f".samestep-{job}-{variable('SLURM_RESTART_COUNT', '0')}.json"


def publish(path: Path, told: dict[str, Any]) -> None:
    """Puts what the others need to know where they look for it; readable by this user alone."""
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(told, file)
    draft.replace(path)


def await_published(path: Path, seconds: float) -> dict[str, Any]:
    """Returns what was published.

    Raises:
        RendezvousError: nothing was, in time.
    """
    until = time.monotonic() + seconds
    pause = SOONEST
    while True:
        try:
            if time.time() - path.stat().st_mtime < STALE:
                found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
                return found
        except FileNotFoundError:
            pass
        if time.monotonic() >= until:
            raise RendezvousError(
                f"task 0 has not said where it is, in {path} within {seconds:.0f} s: did it start, and do all hosts "
                "share this directory?"
            )
        time.sleep(pause)
        pause = min(LATEST, pause * 1.5)
