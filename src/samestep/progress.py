"""How far a rank is: a record in memory that it shares with whoever watches over it.

    offset  size
         0     4   layout of this record: 1
         4     4   process of the rank
         8     8   optimizer steps committed or finished since the run began, over all attempts
        16     8   CLOCK_MONOTONIC in nanoseconds at the last change; 0 before the first

One writer, aligned words: a reader needs no lock, and a rank that hangs, or whose interpreter is held by native code,
cannot keep it from being read. The memory outlives the rank, so its last step is known after any death.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass

__all__: list[str] = []

LAYOUT = 1
SIZE = 4096
_HEAD, _STEP, _CHANGED = struct.Struct("=II"), struct.Struct("=Q"), struct.Struct("=Q")
_memory: list[mmap.mmap] = []


@dataclass(frozen=True)
class Progress:
    """What a record says; `changed` is in seconds of the monotonic clock, None before the first step."""

    process: int
    step: int
    changed: float | None


def create() -> int:
    """Returns a descriptor of new memory for one rank's record."""
    descriptor = os.memfd_create("samestep-progress", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, SIZE)
    return descriptor


def attach(descriptor: int) -> None:
    """Makes this process the writer of the record behind an inherited descriptor."""
    memory = mmap.mmap(descriptor, SIZE)
    os.close(descriptor)
    _HEAD.pack_into(memory, 0, LAYOUT, os.getpid())
    _memory[:] = [memory]


def note_step(step: int) -> None:
    """Writes down that `step` steps are finished; does nothing in a process without a record."""
    for memory in _memory:
        _STEP.pack_into(memory, 8, step)
        _CHANGED.pack_into(memory, 16, time.monotonic_ns())


def read(descriptor: int) -> Progress:
    """Returns what a rank has written so far."""
    raw = os.pread(descriptor, 24, 0)
    _, process = _HEAD.unpack_from(raw, 0)
    changed = _CHANGED.unpack_from(raw, 16)[0]
    return Progress(process, _STEP.unpack_from(raw, 8)[0], changed / 1e9 if changed else None)
