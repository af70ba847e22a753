"""The pipe between a rank and the process that watches it: both ends, and what the watcher knows of the rank.

A thread reads the commands: the main thread may be in a collective for long, and a signal would end the workers of a
DataLoader, or run a handler of the script's that saves with peers that are dead.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

from samestep import progress
from samestep.launch.link import HEAD, Link, frame
from samestep.launch.monitor import flight_recorder
from samestep.launch.rank.user_code import SERVED, UNKNOWN, own_line, place_in, text_of, tried

FLUSH_S = 0.3  # how long leaving may wait for a stream that another thread holds

Preempt = Callable[[int], None]  # gets the number of the signal that the launcher got

_preempt: list[Preempt] = []
_pace = [""]


def when_preempted(preempt: Preempt | None) -> None:
    """Registers the function that saves and leaves when this rank is to be preempted; None removes it.

    It is called on a thread other than the main one, and must return at once.
    """
    _preempt[:] = [] if preempt is None else [preempt]


def preempt(number: int) -> bool:
    """Passes the command on; returns False where no function is registered."""
    for one in _preempt:
        one(number)
    return bool(_preempt)


def pace() -> str:
    """Returns what the launcher knows: "waiting 31%  slowest rank 2 (1.4x)"; "" where it knows nothing."""
    return _pace[0]


class Control:
    """The rank's end; where it is `binding`, the rank ends when the other side has.

    `stacks` is the descriptor of the file that the stacks of the threads are written to.
    """

    def __init__(self, descriptor: int, stacks: int, *, binding: bool = True) -> None:
        os.set_inheritable(descriptor, False)
        self._socket = socket.socket(fileno=descriptor)
        self._lock = threading.Lock()
        self._main = threading.main_thread().ident
        self._stacks = stacks
        self._binding = binding

    def send(self, kind: str, **body: Any) -> None:
        """Sends one message. A launcher that is gone receives nothing, and ends this rank anyway."""
        with self._lock, contextlib.suppress(OSError):
            self._socket.sendall(frame({"kind": kind, **body}))

    def start(self) -> None:
        self._reader = threading.Thread(target=self._read, name="samestep-control", daemon=True)
        self._reader.start()

    def await_end(self, seconds: float) -> None:
        self._reader.join(seconds)

    def _read(self) -> None:
        with self._socket.makefile("rb") as stream:
            while len(head := stream.read(HEAD.size)) == HEAD.size:
                self._carry_out(json.loads(stream.read(HEAD.unpack(head)[0])))
        if self._binding:
            os._exit(128 + signal.SIGKILL)

    def _carry_out(self, command: dict[str, Any]) -> None:
        if command["kind"] == "stop":
            self._leave(command["number"] or 128 + signal.SIGTERM)
        elif command["kind"] == "flight":
            nothing: list[dict[str, Any]] = []
            self.send("flight", collectives=tried(flight_recorder.last_collectives, nothing))
        elif command["kind"] == "write_stacks":
            self._write_stacks()
        elif command["kind"] == "pace":
            _pace[0] = command["text"]
        elif command["kind"] == "preempt" and not preempt(command["number"]):
            number = command["number"]
            handles = signal.getsignal(number) not in {signal.SIG_DFL, None}
            self.send("preempt_unsupported", number=number, handles=handles)

    def _write_stacks(self) -> None:
        """Writes the stacks of the other threads as faulthandler does, but the main thread's first.

        This thread has the GIL, so that no other one changes its frames. faulthandler's signal handler reads them
        without it, and ends a process whose threads run Python code at that moment: it is for a rank whose native code
        keeps the GIL, so that this thread never gets here.
        """
        frames = sys._current_frames()  # noqa: SLF001  (documented; the name only looks private)
        frames.pop(threading.get_ident())
        order = sorted(frames, key=lambda thread: thread != self._main)
        named = {thread: "Main thread" if thread == self._main else "Thread" for thread in order}
        text = "".join(_stack_text(f"{named[thread]} {thread:#018x}", frames[thread]) for thread in order)
        with contextlib.suppress(OSError):
            os.write(self._stacks, text.encode(errors="replace"))

    def _leave(self, code: int) -> NoReturn:
        where, source = tried(self._position, UNKNOWN)  # whatever that meets: this rank must go
        self.send("position", where=where, source=source)
        flushing = threading.Thread(target=_flush, daemon=True)
        flushing.start()
        flushing.join(FLUSH_S)
        os._exit(code)

    def _position(self) -> tuple[str | None, str | None]:
        """Returns the line of the main thread, or of what it serves another rank with (torch.distributed.rpc)."""
        frames = sys._current_frames()  # noqa: SLF001  (documented; the name only looks private)
        stacks = [traceback.extract_stack(frame) for frame in frames.values()]
        served = [stack for stack in stacks if any(SERVED.endswith(f" {frame.name}") for frame in stack)]
        if served:
            return own_line(served[0])
        frame = frames.get(self._main or 0)
        return own_line(traceback.extract_stack(frame)) if frame is not None else (None, None)


def _stack_text(thread: str, frame: FrameType) -> str:
    calls = traceback.walk_stack(frame)  # the most recent first
    lines = [f'  File "{call.f_code.co_filename}", line {line} in {call.f_code.co_name}' for call, line in calls]
    return "\n".join((f"{thread} (most recent call first):", *lines, "", ""))


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


class RankProcess:
    """A rank's process, a child of this one or not; `stacks` and `record` are descriptors."""

    def __init__(self, rank: int, pid: int, pipe: Link, stacks: int, record: int) -> None:
        self.rank, self.pid, self.pipe = rank, pid, pipe
        self.stacks, self.record = stacks, record
        self._read = 0  # bytes of the stacks

    def receive(self, take: Callable[[str, dict[str, Any]], object]) -> None:
        for message in self.pipe.receive():
            take(message.kind, message.body)

    def progress(self) -> progress.Progress:
        return progress.read(self.record)

    def has_new_stacks(self) -> bool:
        return os.fstat(self.stacks).st_size > self._read

    def new_stacks(self) -> bytes:
        size = os.fstat(self.stacks).st_size
        text = os.pread(self.stacks, size - self._read, self._read)
        self._read = size
        return text

    def position(self) -> tuple[bytes, dict[str, Any]]:
        """Returns the stacks that it was asked for, and the message that tells the user's own line in them."""
        stacks = self.new_stacks()
        serving = SERVED if self.progress().serving else None
        where, source = place_in(stacks.decode(errors="replace"), serving)
        return stacks, {"rank": self.rank, "where": where, "source": source}

    def place_of_death(self, show: Callable[[bytes], object]) -> tuple[str | None, str | None]:
        """Shows the stacks that it died with; returns the user's own line in them, or in its record."""
        stacks = self.new_stacks()
        if stacks:
            show(stacks)
        place, record = place_in(stacks.decode(errors="replace")), self.progress()
        return (record.site, text_of(record.site)) if place[0] is None and record.in_collective else place

    def end_message(self, code: int, death: dict[str, Any]) -> dict[str, Any]:
        """Returns the message to the supervisor at its end; `death` is a FailureRecord, `code` the exit code."""
        record = self.progress()
        ended = {"rank": self.rank, "pid": self.pid, "code": code, "death": death}
        return {**ended, "step": record.step, "collectives": record.entered}
