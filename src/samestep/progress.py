"""How far a rank is and what it is at: a record in memory that it shares with whoever watches over it.

    offset  size
         0     4   layout of this record: 3
         4     4   process of the rank
         8     8   optimizer steps finished since the run began; over all attempts, where a checkpoint counts them
        16     8   when the last of them was
        24     8   how often the lines below were written, times 2; odd while they are
        32     8   when the phase began
        40    16   the phase: "data", "train", "evaluate", "save", "load"; empty before the first
        56     8   collectives that the rank has entered
        64     8   collectives that it has left: one less while it is inside one
        72     8   when it entered the last
        80    32   its name
       112   400   where the script called it: "file:line", the end of it where it is longer
       512    24   time up to the end of the last step: waiting for other ranks, for data, and apart from training

Apart from training are evaluations, saves and loads, whatever is waited for in them. Times are CLOCK_MONOTONIC in
nanoseconds, 0 before the first; texts are UTF-8 filled up with zeros. One writer: a reader needs no lock, and a rank
that hangs, or whose interpreter is held by native code, cannot keep it from being read. The memory outlives the rank,
so what it was at is known after any death.

torchrun knows of its ranks only whether they live.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__: list[str] = []

LAYOUT = 3
SIZE = 4096
_HEAD, _STEPS = struct.Struct("=II"), struct.Struct("=QQ")
_WORD, _PHASE, _CALL = struct.Struct("=Q"), struct.Struct("=Q16s"), struct.Struct("=QQQ32s400s")
_SPENT = struct.Struct("=QQQ")
_AT_STEPS, _AT_VERSION, _AT_PHASE, _AT_CALL, _AT_SPENT, _END = 8, 24, 32, 56, 512, 536
_AT_LEFT = _AT_CALL + 8
_APART = {b"evaluate", b"save", b"load"}
_TRIES = 100  # reads until one falls between two writes; a rank that died while writing never does


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What a record says; times are in seconds of the monotonic clock, None before the first."""

    process: int
    step: int
    changed: float | None
    phase: str
    phase_since: float | None
    entered: int
    left: int
    since: float | None
    operation: str
    site: str
    waited: float = 0.0  # these three up to the end of the last step
    data: float = 0.0
    apart: float = 0.0

    @property
    def in_collective(self) -> bool:
        """Whether the rank stood in a collective when the record was read."""
        return self.entered > self.left

    def __str__(self) -> str:
        """What the rank is at: "in all_reduce, its collective 12, at train.py:40", say; "" where that is unknown."""
        doing = {"data": "waiting for data", "evaluate": "evaluating", "save": "saving", "load": "loading"}
        if self.in_collective:
            return f"in {self.operation}, its collective {self.entered}, at {self.site}"
        return doing.get(self.phase, "")


class Record:
    """The writer's side.

    Args:
        memory: of SIZE bytes, shared with the readers.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._version = 0
        self._steps = 0
        self._told = False  # somebody who counts over all attempts has told the step
        self._phase = b""
        self._began = time.monotonic_ns()  # the phase
        self._entered = 0
        self._called = 0  # when the collective was entered
        self._ready: int | None = None  # when this rank's own part of a backward pass was done
        self._waited = self._data = self._apart = 0
        _HEAD.pack_into(memory, 0, LAYOUT, os.getpid())

    def note_step(self, step: int) -> None:
        """Writes down that `step` steps are finished."""
        self._told = True
        self._write_step(step)

    def count_step(self) -> None:
        """Writes down one more finished step, unless somebody tells how many there are."""
        if not self._told:
            self._write_step(self._steps + 1)

    def _write_step(self, step: int) -> None:
        self._steps = step
        with self._writing():
            _STEPS.pack_into(self._memory, _AT_STEPS, step, time.monotonic_ns())
            _SPENT.pack_into(self._memory, _AT_SPENT, self._waited, self._data, self._apart)

    def note_phase(self, name: str) -> str:
        """Writes down what the rank is at from now on; returns what it was at."""
        before, self._phase = self._phase, _bytes(name)
        if before != self._phase:
            now = time.monotonic_ns()
            if before == b"data":
                self._data += now - self._began
            elif before in _APART:
                self._apart += now - self._began
            self._began = now
            with self._writing():
                _PHASE.pack_into(self._memory, _AT_PHASE, now, self._phase)
        return before.decode()

    def end_phase(self, name: str) -> None:
        """Writes down that the rank is not at that any more, if it was."""
        if self._phase and self._phase == _bytes(name):
            self.note_phase("")

    def enter(self, operation: str, site: str) -> None:
        """Writes down that the rank is about to take part in a collective."""
        self._entered += 1
        line, name = _bytes(site)[-400:], _bytes(operation)[:32]
        self._called = time.monotonic_ns()
        with self._writing():
            _CALL.pack_into(self._memory, _AT_CALL, self._entered, self._entered - 1, self._called, name, line)

    def leave(self) -> None:
        """Writes down that it has come back from it."""
        _WORD.pack_into(self._memory, _AT_LEFT, self._entered)
        self._wait_since(self._called)

    def note_ready(self) -> None:
        """Writes down that the rank has done its own part of a backward pass."""
        self._ready = time.monotonic_ns()

    def note_backward(self) -> None:
        """Writes down that a backward pass has ended: from its own part on, the rank has waited for others."""
        if self._ready is not None:
            self._wait_since(self._ready)
            self._ready = None

    def _wait_since(self, began: int) -> None:
        if self._phase != b"data" and self._phase not in _APART:
            self._waited += time.monotonic_ns() - began

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        _WORD.pack_into(self._memory, _AT_VERSION, self._version + 1)
        yield
        self._version += 2
        _WORD.pack_into(self._memory, _AT_VERSION, self._version)


_records: list[Record] = []  # this process's own; empty where nobody watches


def create() -> int:
    """Returns a descriptor of new memory for one rank's record."""
    descriptor = os.memfd_create("samestep-progress", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, SIZE)
    return descriptor


def create_file(path: Path) -> int:
    """Returns a descriptor of new memory that others find by its path."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    os.ftruncate(descriptor, SIZE)
    return descriptor


def attach(descriptor: int) -> None:
    """Makes this process the writer of the record behind a descriptor, which it takes."""
    memory = mmap.mmap(descriptor, SIZE)
    os.close(descriptor)
    _records[:] = [Record(memory)]


def detach() -> None:
    """Writes no more: for a process that was forked by the one whose record this is."""
    _records.clear()


def is_attached() -> bool:
    """Tells whether this process has a record."""
    return bool(_records)


def note_step(step: int) -> None:
    """Writes down that `step` steps are finished; does nothing in a process without a record."""
    for record in _records:
        record.note_step(step)


def count_step() -> None:
    """Writes down one more finished step, unless :func:`note_step` is in use."""
    for record in _records:
        record.count_step()


def note_phase(name: str) -> str:
    """Writes down what this process is at from now on; returns what it was at."""
    before = ""
    for record in _records:
        before = record.note_phase(name)
    return before


def end_phase(name: str) -> None:
    """Writes down that this process is not at that any more, if it was."""
    for record in _records:
        record.end_phase(name)


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Writes down what this process is at meanwhile."""
    before = note_phase(name)
    try:
        yield
    finally:
        note_phase(before)


def note_ready() -> None:
    """Writes down that this process has done its own part of a backward pass."""
    for record in _records:
        record.note_ready()


def note_backward() -> None:
    """Writes down that a backward pass has ended."""
    for record in _records:
        record.note_backward()


def enter(operation: str, site: str) -> None:
    """Writes down that this process takes part in a collective, called by the script at "file:line"."""
    for record in _records:
        record.enter(operation, site)


def leave() -> None:
    """Writes down that it has come back from it."""
    for record in _records:
        record.leave()


def read(descriptor: int) -> Progress:
    """Returns what a rank has written so far."""
    for _ in range(_TRIES):
        raw = os.pread(descriptor, _END, 0)
        after = os.pread(descriptor, 8, _AT_VERSION)
        if raw[_AT_VERSION : _AT_VERSION + 8] == after and not _WORD.unpack(after)[0] % 2:
            break
    return _parsed(raw)


def read_file(path: Path) -> Progress:
    """Returns what a rank has written so far into a record that :func:`create_file` made."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return read(descriptor)
    finally:
        os.close(descriptor)


def _parsed(raw: bytes) -> Progress:
    step, changed = _STEPS.unpack_from(raw, _AT_STEPS)
    phase_since, name = _PHASE.unpack_from(raw, _AT_PHASE)
    waited, data, apart = _SPENT.unpack_from(raw, _AT_SPENT)
    entered, left, since, operation, site = _CALL.unpack_from(raw, _AT_CALL)
    return Progress(
        process=_HEAD.unpack_from(raw, 0)[1],
        step=step,
        changed=_seconds(changed),
        phase=_text(name),
        phase_since=_seconds(phase_since),
        entered=entered,
        left=left,
        since=_seconds(since),
        operation=_text(operation),
        site=_text(site),
        waited=waited / 1e9,
        data=data / 1e9,
        apart=apart / 1e9,
    )


def _seconds(nanoseconds: int) -> float | None:
    return nanoseconds / 1e9 if nanoseconds else None


def _bytes(text: str) -> bytes:
    return text.encode(errors="backslashreplace")  # a file's name may be of bytes that are no UTF-8


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode(errors="replace")
