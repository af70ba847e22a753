"""How far a rank is and what it is at: a record in memory that it shares with whoever watches over it.

    offset  size
         0     4   layout of this record: 4
         4     4   process of the rank
         8     8   optimizer steps finished since the run began; over all attempts, where a checkpoint counts them
        16     8   when the last of them was
        24     8   how often the lines below were written, times 2; odd while they are
        32     8   when the phase began
        40    16   the phase: "data", "train", "backward", "wait", "optimizer", "evaluate", "save", "load"
        56     8   collectives that the rank has entered
        64     8   collectives that it has left: one less while it is inside one
        72     8   when it entered the last
        80    32   its name
       112   400   where the script called it: "file:line", the end of it where it is longer
       512    24   time up to the end of the last step: waiting for other ranks, for data, and apart from training
       536     8   what it has worked on up to then: samples, tokens or whatever its steps are weighed by, a double

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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from samestep.progress_listener import ProgressListener

__all__: list[str] = []

LAYOUT = 4
SIZE = 4096
_HEAD, _STEPS = struct.Struct("=II"), struct.Struct("=QQ")
_WORD, _PHASE, _CALL = struct.Struct("=Q"), struct.Struct("=Q16s"), struct.Struct("=QQQ32s400s")
_SPENT = struct.Struct("=QQQd")
_AT_STEPS, _AT_VERSION, _AT_PHASE, _AT_CALL, _AT_SPENT, _END = 8, 24, 32, 56, 512, 544
_AT_LEFT = _AT_CALL + 8
_NON_TRAINING = {b"evaluate", b"save", b"load"}
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
    non_training: float = 0.0
    load: float = 0.0

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


class ProgressRecord(ProgressListener):
    """The writer's side of the memory.

    Args:
        memory: of SIZE bytes, shared with the readers.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._version = 0
        self._phase = b""
        self._began = time.monotonic_ns()  # the phase
        self._entered = 0
        self._called = 0  # when the collective was entered
        self._ready: int | None = None  # when this rank's own part of a backward pass was done
        self._waited = self._data = self._non_training = 0
        self._load = 0.0
        _HEAD.pack_into(memory, 0, LAYOUT, os.getpid())

    def resume_from(self, step: int) -> None:
        """Writes down where the run goes on."""
        self.set_step(step)

    def set_step(self, step: int) -> None:
        """Writes down that `step` steps are finished."""
        self._begin_writing()
        _STEPS.pack_into(self._memory, _AT_STEPS, step, time.monotonic_ns())
        _SPENT.pack_into(self._memory, _AT_SPENT, self._waited, self._data, self._non_training, self._load)
        self._end_writing()

    def set_phase(self, name: str) -> None:
        """Writes down what the rank is at from now on."""
        self._write_phase(_bytes(name))

    def _write_phase(self, name: bytes) -> None:
        before, self._phase = self._phase, name
        if before != self._phase:
            now = time.monotonic_ns()
            if before == b"data":
                self._data += now - self._began
            elif before in _NON_TRAINING:
                self._non_training += now - self._began
            self._began = now
            self._begin_writing()
            _PHASE.pack_into(self._memory, _AT_PHASE, now, self._phase)
            self._end_writing()

    def enter_collective(self, operation: str, site: str, *, direct: bool = True) -> None:
        """Writes down that the rank is about to take part in a collective."""
        del direct
        self._entered += 1
        line, name = _bytes(site)[-400:], _bytes(operation)[:32]
        self._called = time.monotonic_ns()
        self._begin_writing()
        _CALL.pack_into(self._memory, _AT_CALL, self._entered, self._entered - 1, self._called, name, line)
        self._end_writing()

    def exit_collective(self) -> None:
        """Writes down that it has come back from it; what a backward pass waits for is counted as its wait."""
        _WORD.pack_into(self._memory, _AT_LEFT, self._entered)
        if self._phase != b"wait":
            self._wait_since(self._called)

    def gradients_ready(self) -> None:
        """Writes down that the rank has done its own part of a backward pass, and waits for the others."""
        self._ready = time.monotonic_ns()
        if self._phase == b"backward":
            self._write_phase(b"wait")

    def backward_done(self) -> None:
        """Writes down that a backward pass has ended: from its own part on, the rank has waited for others."""
        if self._ready is not None:
            self._wait_since(self._ready)
            self._ready = None
        if self._phase == b"wait":
            self._write_phase(b"backward")

    def add_work(self, work: Mapping[str, float]) -> None:
        """Adds up what the rank's steps are weighed by."""
        self._load += work.get("weight", 0.0) or work.get("elements", 0.0)

    def _wait_since(self, began: int) -> None:
        if self._phase != b"data" and self._phase not in _NON_TRAINING:
            self._waited += time.monotonic_ns() - began

    def _begin_writing(self) -> None:
        _WORD.pack_into(self._memory, _AT_VERSION, self._version + 1)

    def _end_writing(self) -> None:
        self._version += 2
        _WORD.pack_into(self._memory, _AT_VERSION, self._version)


_listeners: list[ProgressListener] = []  # this process's own record first; empty where nobody watches
_phase = [""]
_steps = [0]  # that are finished
_counts = [True]  # the optimizer's steps are; else somebody who counts over all attempts tells the number


def create() -> int:
    """Returns a descriptor of new memory for one rank's record."""
    descriptor = os.memfd_create("samestep-progress", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, SIZE)
    return descriptor


def create_file(path: Path) -> int:
    """Returns a descriptor of new memory that others find by its path."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    os.ftruncate(descriptor, SIZE)
    return descriptor


def attach(descriptor: int) -> None:
    """Makes this process the writer of the record behind a descriptor, which it takes."""
    memory = mmap.mmap(descriptor, SIZE)
    os.close(descriptor)
    _listeners[:] = [ProgressRecord(memory)]
    _phase[0], _steps[0], _counts[0] = "", 0, True


def add_listener(listener: ProgressListener) -> None:
    """Lets somebody else take note too."""
    _listeners.append(listener)


def detach() -> None:
    """Writes no more: for a process that was forked by the one whose record this is."""
    _listeners.clear()


def is_attached() -> bool:
    """Tells whether this process has a record."""
    return bool(_listeners)


def resume_from(step: int) -> None:
    """Writes down that `step` steps were finished before; from now on :func:`set_step` tells how many there are."""
    _steps[0], _counts[0] = step, False
    for listener in _listeners:
        listener.resume_from(step)


def set_step(step: int) -> None:
    """Writes down that `step` steps are finished; in a process without a record nobody reads it."""
    _steps[0], _counts[0] = step, False
    for listener in _listeners:
        listener.set_step(step)


def count_step() -> None:
    """Writes down one more finished step, unless :func:`set_step` is in use."""
    if _counts[0]:
        _steps[0] += 1
        for listener in _listeners:
            listener.set_step(_steps[0])


def finished_steps() -> int:
    """Returns how many steps are finished."""
    return _steps[0]


def set_phase(name: str) -> str:
    """Writes down what this process is at from now on; returns what it was at. Without a record it is at nothing."""
    if not _listeners:
        return ""
    before, _phase[0] = _phase[0], name
    if before != name:
        for listener in _listeners:
            listener.set_phase(name)
    return before


def current_phase() -> str:
    """Returns what this process is at."""
    return _phase[0]


def end_phase(name: str) -> None:
    """Writes down that this process is not at that any more, if it was."""
    if name and _phase[0] == name:
        set_phase("")


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Writes down what this process is at meanwhile."""
    before = set_phase(name)
    try:
        yield
    finally:
        set_phase(before)


def gradients_ready() -> None:
    """Writes down that this process has done its own part of a backward pass."""
    for listener in _listeners:
        listener.gradients_ready()


def backward_done() -> None:
    """Writes down that a backward pass has ended."""
    for listener in _listeners:
        listener.backward_done()


def enter_collective(operation: str, site: str, *, direct: bool = True) -> None:
    """Writes down that this process takes part in a collective, called by the script at "file:line", or within it."""
    for listener in _listeners:
        listener.enter_collective(operation, site, direct=direct)


def exit_collective() -> None:
    """Writes down that it has come back from it."""
    for listener in _listeners:
        listener.exit_collective()


def bucket_filled(number: int, size: int, *, begun: bool) -> None:
    """Writes down that a gradient bucket of `size` bytes is filled, and, if `begun`, on its way to the other ranks."""
    for listener in _listeners:
        listener.bucket_filled(number, size, begun=begun)


def bucket_reduced(number: int) -> None:
    """Writes down that it holds the mean."""
    for listener in _listeners:
        listener.bucket_reduced(number)


def add_work(work: Mapping[str, float]) -> None:
    """Writes down what this rank has of the step that it is in, or of one of its micro-batches."""
    for listener in _listeners:
        listener.add_work(work)


def log_values(values: Mapping[str, float | str]) -> None:
    """Writes down numbers that belong to the step that was finished last; "nan", "inf" and "-inf" are texts."""
    for listener in _listeners:
        listener.log_values(values)


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
    waited, data, non_training, load = _SPENT.unpack_from(raw, _AT_SPENT)
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
        non_training=non_training / 1e9,
        load=load,
    )


def _seconds(nanoseconds: int) -> float | None:
    return nanoseconds / 1e9 if nanoseconds else None


def _bytes(text: str) -> bytes:
    return text.encode(errors="backslashreplace")  # a file's name may be of bytes that are no UTF-8


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode(errors="replace")
