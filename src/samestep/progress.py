"""How far a rank is and what it does: a record in shared memory, and listeners within the process.

A reader needs no lock, and nothing in the rank can keep it from reading. The memory outlives the rank. Times are
CLOCK_MONOTONIC in nanoseconds, 0 before the first; texts are UTF-8.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

LAYOUT = 5
SIZE = 4096
_VERSION = struct.Struct("=Q")
SHUTDOWN = "rpc.shutdown"
_NON_TRAINING = {"evaluate", "save", "load"}
_TRIES = 100  # reads until one falls between two writes; a rank that died while writing never does


class Layout(ctypes.Structure):
    """The bytes of a record."""

    _fields_ = (
        ("layout", ctypes.c_uint32),
        ("process", ctypes.c_uint32),
        ("step", ctypes.c_uint64),  # optimizer steps finished; over all attempts, where a checkpoint counts them
        ("changed", ctypes.c_uint64),
        ("version", ctypes.c_uint64),  # grows by two when the fields below are written; odd while they are
        ("phase_since", ctypes.c_uint64),
        ("phase", ctypes.c_char * 16),  # data, train, backward, wait, optimizer, evaluate, save, load
        ("entered", ctypes.c_uint64),  # collectives
        ("left", ctypes.c_uint64),  # one less while the rank is inside one
        ("call_time", ctypes.c_uint64),
        ("operation", ctypes.c_char * 32),
        ("site", ctypes.c_char * 400),  # "file:line" of the script, the end of it where it is longer
        ("waited", ctypes.c_uint64),  # these four up to the end of the last step: for other ranks
        ("data", ctypes.c_uint64),
        ("non_training", ctypes.c_uint64),  # evaluations, saves and loads, whatever is waited for in them
        ("load", ctypes.c_double),  # samples, tokens or whatever steps are weighed by
        ("calls", ctypes.c_uint64),  # changes of the fields below: those of torch.distributed.rpc
        ("callee", ctypes.c_int64),  # the rank that the oldest call waits for, -1 without one
        ("call", ctypes.c_char * 200),  # its function; SHUTDOWN in rpc.shutdown
        ("call_site", ctypes.c_char * 400),
        ("serving", ctypes.c_char * 200),  # the function that runs longest here for another rank
    )


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What a record says; times are in seconds of the monotonic clock, None before the first."""

    process: int = 0
    step: int = 0
    changed: float | None = None
    phase: str = ""
    phase_since: float | None = None
    entered: int = 0
    left: int = 0
    operation: str = ""
    site: str = ""
    waited: float = 0.0  # these four up to the end of the last step
    data: float = 0.0
    non_training: float = 0.0
    load: float = 0.0
    calls: int = 0
    callee: int = -1
    call: str = ""
    call_site: str = ""
    serving: str = ""

    @property
    def in_collective(self) -> bool:
        return self.entered > self.left

    def __str__(self) -> str:
        """What the rank does: "in all_reduce, its collective 12, at train.py:40", say; "" where that is unknown."""
        doing = {"data": "waiting for data", "evaluate": "evaluating", "save": "saving", "load": "loading"}
        if self.in_collective:
            return f"in {self.operation}, its collective {self.entered}, at {self.site}"
        if self.callee >= 0:
            return f"waiting for {self.call} on rank {self.callee}, at {self.call_site}"
        return doing.get(self.phase, "")


class ProgressListener:
    """Base class of progress listeners. Methods that are not overridden do nothing."""

    def resume_from(self, step: int) -> None:
        """Called once: `step` steps were finished before this process began."""

    def set_step(self, step: int) -> None:
        """Called when `step` steps are finished."""

    def set_phase(self, name: str) -> None:
        """Called when the process enters phase `name`."""

    def enter_collective(self, operation: str, site: str, *, direct: bool = True) -> None:
        """Called before a collective; `direct` where the script's own line calls it, not a function called there."""

    def exit_collective(self) -> None:
        """Called after the collective."""

    def set_calls(self, call: str, callee: int, site: str, serving: str) -> None:
        """Called when a call of torch.distributed.rpc begins or ends: the fields of a record from `call` on."""

    def gradients_ready(self) -> None:
        """Called when this rank's own part of a backward pass is done."""

    def backward_done(self) -> None:
        """Called when a backward pass has ended."""

    def bucket_filled(self, number: int, size: int, *, begun: bool) -> None:
        """Called when a gradient bucket of `size` bytes is filled; `begun` if its reduction has started."""

    def bucket_reduced(self, number: int) -> None:
        """Called when the bucket holds the mean."""

    def add_work(self, work: Mapping[str, float]) -> None:
        """Called with this rank's work in the step or micro-batch: samples, weight, elements, epoch."""

    def log_values(self, values: Mapping[str, float | str]) -> None:
        """Called with the values that the script logs for the step finished last; "nan", "inf", "-inf" are texts."""


class ProgressRecord(ProgressListener):
    """The writer of a record in `memory`, which is SIZE bytes shared with the readers."""

    def __init__(self, memory: mmap.mmap) -> None:
        self.fields = Layout.from_buffer(memory)
        self.fields.layout, self.fields.process, self.fields.callee = LAYOUT, os.getpid(), -1
        self._phase = ""
        self._began = time.monotonic_ns()  # the phase
        self._ready: int | None = None  # when this rank's own part of a backward pass was done
        self._waited = self._data = self._non_training = 0
        self._load = 0.0

    def resume_from(self, step: int) -> None:
        self.set_step(step)

    def set_step(self, step: int) -> None:
        with self._writing() as fields:
            fields.step, fields.changed = step, time.monotonic_ns()
            fields.waited, fields.data, fields.non_training = self._waited, self._data, self._non_training
            fields.load = self._load

    def set_phase(self, name: str) -> None:
        before, self._phase = self._phase, name
        if before != name:
            now = time.monotonic_ns()
            if before == "data":
                self._data += now - self._began
            elif before in _NON_TRAINING:
                self._non_training += now - self._began
            self._began = now
            with self._writing() as fields:
                fields.phase_since, fields.phase = now, _bytes(name)[:16]

    def enter_collective(self, operation: str, site: str, *, direct: bool = True) -> None:
        del direct
        place, name, now = _bytes(site)[-400:], _bytes(operation)[:32], time.monotonic_ns()
        fields = self.fields  # the lines of _writing, for speed: a script may call thousands of collectives a second
        fields.version |= 1
        fields.entered += 1
        fields.call_time, fields.operation, fields.site = now, name, place
        fields.version = (fields.version | 1) + 1

    def exit_collective(self) -> None:
        self.fields.left = self.fields.entered
        if self._phase != "wait":  # what a backward pass waits for is counted as its wait
            self._wait_since(self.fields.call_time)

    def set_calls(self, call: str, callee: int, site: str, serving: str) -> None:
        with self._writing() as fields:
            fields.calls += 1
            fields.callee, fields.call, fields.call_site = callee, _bytes(call)[:200], _bytes(site)[-400:]
            fields.serving = _bytes(serving)[:200]

    def gradients_ready(self) -> None:
        self._ready = time.monotonic_ns()
        if self._phase == "backward":
            self.set_phase("wait")

    def backward_done(self) -> None:
        if self._ready is not None:
            self._wait_since(self._ready)
            self._ready = None
        if self._phase == "wait":
            self.set_phase("backward")

    def add_work(self, work: Mapping[str, float]) -> None:
        self._load += work.get("weight", 0.0) or work.get("elements", 0.0)

    def _wait_since(self, began: int) -> None:
        if self._phase != "data" and self._phase not in _NON_TRAINING:
            self._waited += time.monotonic_ns() - began

    @contextlib.contextmanager
    def _writing(self) -> Iterator[Layout]:
        """Makes the version odd meanwhile, and even in the end also where two threads write at once."""
        self.fields.version |= 1
        yield self.fields
        self.fields.version = (self.fields.version | 1) + 1


_listeners: list[ProgressListener] = []  # this process's own record first; empty where it is not watched
_phase = [""]
_steps = [0]  # that are finished
_counts = [True]  # the optimizer's steps are; else a checkpoint, which counts over all attempts, reports the number


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
    """Makes this process the writer of the record behind a descriptor, which is closed."""
    memory = mmap.mmap(descriptor, SIZE)
    os.close(descriptor)
    _listeners[:] = [ProgressRecord(memory)]
    _phase[0], _steps[0], _counts[0] = "", 0, True


def add_listener(listener: ProgressListener) -> None:
    _listeners.append(listener)


def detach() -> None:
    """Writes no more: for a process that was forked by the one whose record this is."""
    _listeners.clear()


def is_attached() -> bool:
    return bool(_listeners)


def resume_from(step: int) -> None:
    """Writes down that `step` steps were finished before; from now on :func:`set_step` sets the number."""
    _steps[0], _counts[0] = step, False
    for listener in _listeners:
        listener.resume_from(step)


def set_step(step: int) -> None:
    """Writes down that `step` steps are finished; does nothing in a process without a record."""
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
    return _steps[0]


def set_phase(name: str) -> str:
    """Writes down what this process does from now on; returns what it did. Without a record there are no phases."""
    if not _listeners:
        return ""
    before, _phase[0] = _phase[0], name
    if before != name:
        for listener in _listeners:
            listener.set_phase(name)
    return before


def current_phase() -> str:
    return _phase[0]


def end_phase(name: str) -> None:
    if name and _phase[0] == name:
        set_phase("")


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    before = set_phase(name)
    try:
        yield
    finally:
        set_phase(before)


def _emitter(event: str) -> Callable[..., None]:
    def emit(*args: Any, **named: Any) -> None:
        for listener in _listeners:
            getattr(listener, event)(*args, **named)

    return emit


# Each calls the method of ProgressListener of the same name, of every listener.
enter_collective = _emitter("enter_collective")
exit_collective = _emitter("exit_collective")
set_calls = _emitter("set_calls")
gradients_ready = _emitter("gradients_ready")
backward_done = _emitter("backward_done")
bucket_filled = _emitter("bucket_filled")
bucket_reduced = _emitter("bucket_reduced")
add_work = _emitter("add_work")
log_values = _emitter("log_values")


def read(descriptor: int) -> Progress:
    """Returns what a rank has written so far."""
    for _ in range(_TRIES):
        found = Layout.from_buffer_copy(os.pread(descriptor, ctypes.sizeof(Layout), 0))
        (after,) = _VERSION.unpack(os.pread(descriptor, _VERSION.size, Layout.version.offset))
        if found.version == after and not after % 2:
            break
    if not found.layout:  # no process writes it yet
        found.callee = -1
    return Progress(**{one.name: _value(one.name, getattr(found, one.name)) for one in fields(Progress)})


def _value(name: str, value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if name in {"changed", "phase_since"}:
        return value / 1e9 if value else None
    return value / 1e9 if name in {"waited", "data", "non_training"} else value


def read_file(path: Path) -> Progress:
    """Returns what a rank has written so far into a record that :func:`create_file` made."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return read(descriptor)
    finally:
        os.close(descriptor)


def _bytes(text: str) -> bytes:
    return text.encode(errors="backslashreplace")  # a file's name may be of bytes that are no UTF-8
