"""Which run a directory of checkpoints belongs to, so that a whole checkpoint of another run is not taken for its own.

Digests show that a folder is what was saved; a folder exchanged with that of another run is, and would train on with
foreign weights. So a run draws a name when it begins, and keeps it through all resumptions:

    .run                 "9c41e6d2a07b35f8 5e3a…"     the name, and the beginning of its SHA-256
    step-…/manifest.json "run": "9c41e6d2a07b35f8"    in every checkpoint; schemas 1 and 2 had none, and fit anywhere

A directory without a readable `.run` takes on the name of the checkpoint that is resumed: so one folder copied into a
new directory goes on there. No torch here.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from pathlib import Path

from samestep.files import open_private
from samestep.running.checkpoints.manifest import RUN_NAME

__all__: list[str] = []

FILE = ".run"
_MOST = 1000  # characters that are read of what may be any file


def drawn() -> str:
    """Returns a name that no other run has."""
    return secrets.token_hex(8)


def read(directory: Path) -> str | None:
    """Returns the name of the run that `directory` belongs to; None where nothing readable says so."""
    try:
        descriptor = os.open(directory / FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, encoding="ascii", errors="replace") as file:
            name, _, digest = file.read(_MOST).strip().partition(" ")
    except OSError:
        return None
    return name if RUN_NAME.fullmatch(name) and digest == _digest(name) else None


def write(directory: Path, name: str) -> None:
    """Makes `directory` belong to the run called `name`; whoever reads meanwhile finds the old name or the new one."""
    fresh = directory / f"{FILE}.tmp"
    fresh.unlink(missing_ok=True)  # of a run that was killed here
    with open_private(fresh, "x", encoding="ascii") as file:
        file.write(f"{name} {_digest(name)}\n")
        file.flush()
        os.fsync(file.fileno())
    fresh.rename(directory / FILE)


def foreign(run: str, directory: Path) -> str | None:
    """Returns a line that says so where a checkpoint of the run called `run` does not belong into `directory`."""
    owner = read(directory)
    if owner is None or run in {"", owner}:
        return None
    return f"foreign run in the directory: it is of run {run}, and the directory belongs to run {owner} ({FILE})"


def _digest(name: str) -> str:
    return hashlib.sha256(f"samestep run {name}".encode()).hexdigest()[:32]
