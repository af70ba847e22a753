"""The event log of one process: rank0.jsonl, an event a line, and rank0/00017.pt, its big values. No torch here.

No process sends anything to another: watching can neither reorder communication nor wait for it. A line is one write,
so processes that a rank has forked (a DataLoader's workers) append to the same file, and a death loses nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from samestep.instrument.script_io import save_unreported

SPAWNED = "spawned"  # the folder of ranks that the script itself has started
MOST_KEPT = 2 << 30  # bytes of values that one process keeps


class TraceWriter:
    """Writes the log of one process, and its big values into the folder `values`."""

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.values = folder / f"rank{rank}"
        self._kept = 0
        self._count = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(folder / f"rank{rank}.jsonl", flags, 0o600)

    def write(self, kind: str, **fields: Any) -> None:
        os.write(self._file, (json.dumps({"kind": kind, **fields}, separators=(",", ":")) + "\n").encode())

    @property
    def is_full(self) -> bool:
        """Whether there is no more room for values."""
        return self._kept > MOST_KEPT

    def keep(self, value: Any) -> int | None:
        """Saves a value in a file of its own; returns its number, None where there is no more room."""
        if self.is_full:
            return None
        self.values.mkdir(exist_ok=True)
        self._count += 1
        path = self.values / f"{self._count:05d}.pt"
        save_unreported(value, path)
        self._kept += path.stat().st_size
        return self._count


Event = dict[str, Any]


def read(folder: Path, rank: int) -> list[Event]:
    """Returns a process's events; a torn last line is left out."""
    try:
        lines = (folder / f"rank{rank}.jsonl").read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    return list(_parsed(lines))


def first(path: Path) -> Event | None:
    """Returns the first event of a journal; None where there is none yet."""
    with path.open("rb") as file:
        return next(_parsed([file.readline()]), None)


def value_path(folder: Path, rank: int, number: int) -> Path:
    return folder / f"rank{rank}" / f"{number:05d}.pt"


def _parsed(lines: list[bytes]) -> Iterator[Event]:
    for line in lines:
        if line:
            try:
                event: Event = json.loads(line)
            except ValueError:
                return
            yield event


def place_of(digest: str | None) -> str:
    """Returns the place of the part that a digest is of, which is its prefix; empty for a whole tensor."""
    return "" if digest is None else digest.rpartition(" ")[0]
