"""Writes down a rank's every step, in pieces: where its time goes, in the words of :mod:`samestep.events`.

What lies between data and a backward pass is "forward", all else of the script's own is "other". On a GPU these are
the times that the host spends.
"""

from __future__ import annotations

import functools
import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from samestep import events, progress
from samestep.launch.rank.failure import lost_peer, one_line
from samestep.launch.rank.observers import Observer, RankContext
from samestep.launch.rank.user_code import text_in
from samestep.paths import rank_file
from samestep.progress import ProgressListener
from samestep.rankenv import variable

MOST_SPANS = 64  # of a step that are written down one by one
MOST_KEPT = 1000  # pieces of a step that are kept
LONG = 2_000_000_000  # nanoseconds after which a piece is reported before it is over
_WHOLE = {*events.NON_TRAINING, "data"}  # phases that collectives in them are part of
_FIELDS = dict[str, Any]


# a part of a step: its name, begin and end in nanoseconds of the monotonic clock, and a collective's name and line
Piece = tuple[str, int, int, tuple[str, str] | None]


class Step:
    def __init__(self, began: int) -> None:
        self.began = began
        self.pieces: list[Piece] = []
        self.unnamed: dict[str, int] = {}  # nanoseconds of pieces that are too many to be kept
        self.buckets: dict[int, list[Any]] = {}
        self.work: Mapping[str, float] = {}

    def add(self, name: str, began: int, ended: int, call: tuple[str, str] | None) -> None:
        """Adds a piece to the last, if it goes on, or behind it."""
        pieces = self.pieces
        if pieces and call is None and pieces[-1][0] == name and pieces[-1][2] == began:
            pieces[-1] = (name, pieces[-1][1], ended, None)
        elif len(pieces) < MOST_KEPT:
            pieces.append((name, began, ended, call))
        else:
            self.unnamed[name] = self.unnamed.get(name, 0) + ended - began


class Timeline(Observer, ProgressListener):
    """Records the steps of one rank, and writes events."""

    def __init__(self) -> None:
        self._file: events.EventFile | None = None
        self._thread = threading.get_ident()
        self._finished = 0
        self._count = 0  # steps since the rank began
        self._machine_written = False
        self._values: _FIELDS = {}
        self._values_step, self._values_at = 0, 0.0
        self._phase = ""
        self._call: tuple[str, str] | None = None  # the collective that it stands in
        self._direct = True  # and whether the script itself calls it
        self._ready: int | None = None
        self._since = self._looked = time.monotonic_ns()
        self._step = Step(self._since)
        self._line: list[Step] = []  # that the next line stands for

    # --- observer: begin and end of the script ------------------------------------------------

    def begin(self, context: RankContext) -> None:
        if context.folder is None:
            return
        attempt = int(variable("TORCHELASTIC_RESTART_COUNT") or 0)
        path = rank_file(context.folder, context.rank, "events.jsonl")
        self._file = events.EventFile(path, context.rank, attempt, look=self._look)
        events.attach(self._file)
        progress.add_listener(self)
        host = {"host": socket.gethostname(), "pid": os.getpid(), "size": context.size}
        self._file.put("begin", 0, {**host, "python": platform.python_version()})

    def end(self, error: BaseException | None) -> None:
        if self._file is None:
            return
        self._flush_values()
        now = time.monotonic_ns()
        self._close(now)
        finished = len(self._line)
        self._line.append(self._step)
        self._write_line(finished, now)
        if isinstance(error, SystemExit) and not error.code:
            error = None  # sys.exit() is a good end
        self._file.put("end", self._finished, {"error": None if error is None else _line_of(error)})
        self._file.close()

    # --- listener: what the rank does --------------------------------------------------------------

    def set_phase(self, name: str) -> None:
        if threading.get_ident() == self._thread:
            self._close(time.monotonic_ns())
            self._phase = name

    def enter_collective(self, operation: str, site: str, *, direct: bool = True) -> None:
        """Closes the piece before, unless the collective is part of it; of one within a call no line is kept."""
        if threading.get_ident() == self._thread and self._phase not in _WHOLE:
            self._close(time.monotonic_ns())
            self._call, self._direct = (operation, site), direct

    def exit_collective(self) -> None:
        if self._call is not None and threading.get_ident() == self._thread:
            self._close(time.monotonic_ns())
            self._call = None

    def gradients_ready(self) -> None:
        """From here on the backward pass waits for others; autograd may call from a thread of its own."""
        self._ready = time.monotonic_ns()

    def backward_done(self) -> None:
        if self._ready is not None and self._phase == "backward":
            now = time.monotonic_ns()
            self._close(min(max(self._ready, self._since), now))
            self._close(now, "wait")
        self._ready = None

    def bucket_filled(self, number: int, size: int, *, begun: bool) -> None:
        """A bucket of this step; of one that has passed in another micro-batch, the last counts."""
        now = time.monotonic_ns()
        self._step.buckets[number] = [size, now, now if begun else None, None]

    def bucket_reduced(self, number: int) -> None:
        if number in self._step.buckets:
            self._step.buckets[number][3] = time.monotonic_ns()

    def add_work(self, work: Mapping[str, float]) -> None:
        """This rank's share of the step; of several micro-batches the sum."""
        known = self._step.work
        sums = {name: known.get(name, 0) + each for name, each in work.items() if name != "epoch"}
        self._step.work = {**known, **work, **sums}

    def log_values(self, values: Mapping[str, float | str]) -> None:
        """Kept until the next step has come, so that one line has all of a step; the last of a line's steps counts."""
        every = events.stride(self._count)
        if self._values and self._finished // every != self._values_step // every:
            self._flush_values()
        self._values.update(values)
        self._values_step, self._values_at = self._finished, time.monotonic()

    def resume_from(self, step: int) -> None:
        self._finished = step

    def set_step(self, step: int) -> None:
        """Ends a step, if the optimizer has not done so before anybody counted."""
        if step == self._finished:
            return
        now = time.monotonic_ns()
        self._close(now)
        self._finished, self._count = step, self._count + 1
        self._line.append(self._step)
        if self._values and self._values_step < step:
            self._flush_values()
        if self._count % events.stride(self._count) == 0:
            self._write_line(len(self._line), now)
        self._step = Step(now)

    # --- lines ------------------------------------------------------------------------------------

    def _close(self, now: int, label: str = "") -> None:
        if now > self._since:
            name = label or ("collective" if self._call is not None else self._phase or "train")
            self._step.add(name, self._since, now, self._call if self._direct else None)
        self._since = now

    def _look(self) -> None:
        since, phase, call = self._since, self._phase, self._call  # what is within a call has its line here too
        if self._file is None or since == self._looked or time.monotonic_ns() - since < LONG:
            return
        self._looked = since
        name = "collective" if call is not None else "wait" if phase == "backward" and self._ready else phase
        operation, site = call or (None, None)
        fields = {"phase": name or "train", "operation": operation, "site": site}
        self._file.put("at", self._finished, fields, since / 1e9)

    def _write_line(self, finished: int, now: int) -> None:
        """Hands over a line for the steps since the last; the writing thread makes its text."""
        if self._file is None:
            return
        if not self._machine_written and finished:
            self._machine_written = True
            self._file.put("machine", self._finished, machine())
        line, self._line = self._line, []
        began = line[0].began
        self._file.put("step", self._finished, functools.partial(step_fields, line, finished, now - began), began / 1e9)

    def _flush_values(self) -> None:
        if self._values and self._file is not None:
            self._file.put("values", self._values_step, {"values": self._values}, self._values_at)
        self._values = {}


def step_fields(steps: Sequence[Step], finished: int, length: int) -> _FIELDS:
    """Returns a "step" event's fields, for steps of which the last is written in pieces and `finished` are over.

    `length` is of all, in nanoseconds.
    """
    spent: dict[str, int] = {}
    pieces: list[Piece] = []
    for step in steps:
        pieces = named(step.pieces)
        for name, began, ended, _ in pieces:
            spent[name] = spent.get(name, 0) + ended - began
        for name, nanoseconds in step.unnamed.items():
            known = "other" if name == "train" else name
            spent[known] = spent.get(known, 0) + nanoseconds
    last = steps[-1]
    first = last.began
    return {
        "steps": finished,
        "seconds": length // 1000 / 1e6,
        "spent": {name: nanoseconds // 1000 / 1e6 for name, nanoseconds in spent.items()},
        "spans": [
            [name, (began - first) // 1000, (ended - began) // 1000, *(call or ())]
            for name, began, ended, call in pieces[:MOST_SPANS]
        ],
        "more": max(0, len(pieces) - MOST_SPANS),
        "buckets": [
            [number, size, *(None if time is None else (time - first) // 1000 for time in times)]
            for number, (size, *times) in sorted(last.buckets.items())
        ],
        "work": last.work,
    }


def named(pieces: Sequence[Piece]) -> list[Piece]:
    """Returns a step's pieces with the script's own time called "forward" or "other": by what comes behind it.

    >>> [name for name, *_ in named([(name, 0, 1, None) for name in ("train", "data", "train", "backward")])]
    ['other', 'data', 'forward', 'backward']
    """
    behind, found = "", []
    for piece in reversed(pieces):
        name = piece[0]
        if name == "train":
            found.append(("forward" if behind == "backward" else "other", *piece[1:]))
            continue
        if name != "collective":
            behind = name
        found.append(piece)
    found.reverse()
    return found


def machine() -> _FIELDS:
    """Returns what torch is and has here, without importing it."""
    torch: Any = sys.modules.get("torch")
    dist: Any = sys.modules.get("torch.distributed")
    joined = dist is not None and dist.is_available() and dist.is_initialized()
    cuda = torch is not None and torch.cuda.is_initialized()
    return {
        "torch": None if torch is None else str(torch.__version__),
        "backend": str(dist.get_backend()) if joined else None,
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "threads": None if torch is None else torch.get_num_threads(),
    }


def _line_of(error: BaseException) -> str:
    text = text_in(error)
    line = f"{events.LOST_PEERS}: {one_line(text)}" if lost_peer(error) else f"{type(error).__name__}: {text}"
    return line.splitlines()[0][:500]
