"""The pipe between a rank and whoever watches over it: both its ends.

    rank -> team    failed       why this rank is about to end: its error record
                    waiting      the line that its main thread stood at when it was told to leave
                    preempted    it has saved, at this step and path
                    cannot       nobody here can save: send the signal instead
                    leaving      the interpreter ends in good order (to a watcher, which cannot wait for it)
                    flight       what its flight recorder knows (samestep.launch.flight)
    team -> rank    stop         a peer has failed: leave now
                    flight       say what the flight recorder knows
                    standing     how the ranks stand, for a progress display
                    preempt      save at the next step that all agree on, and leave
    end of file     the launcher is gone: leave now, unless it was a mere watcher (samestep.launch.watcher)

One JSON object a line. A thread of its own reads the orders: the main thread may stand in a collective for as long as
it likes, and a signal would run the script's handler, which may well begin to save with peers that are dead.
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
from typing import Any, NoReturn

from samestep.launch import flight, orders
from samestep.launch.failure import UNKNOWN, own_line, tried

__all__: list[str] = []

CHUNK = 1 << 16  # bytes read at a time
FLUSH_S = 0.3  # how long leaving may wait for a stream that another thread holds


class Control:
    """The rank's end. Call :meth:`obey` once, from the main thread.

    Args:
        descriptor: of a connected socket, which it takes.
        binding: the rank ends when the other side has.
    """

    def __init__(self, descriptor: int, *, binding: bool = True) -> None:
        os.set_inheritable(descriptor, False)
        self._socket = socket.socket(fileno=descriptor)
        self._lock = threading.Lock()
        self._main = threading.main_thread().ident
        self._binding = binding

    def tell(self, kind: str, **body: Any) -> None:
        """Sends one message. A launcher that is gone hears nothing, and ends this rank anyway."""
        line = json.dumps({"kind": kind, **body}).encode() + b"\n"
        with self._lock, contextlib.suppress(OSError):
            self._socket.sendall(line)

    def obey(self) -> None:
        """Follows orders from now on."""
        self._reader = threading.Thread(target=self._read, name="samestep-control", daemon=True)
        self._reader.start()

    def await_end(self, seconds: float) -> None:
        """Waits until the other side has nothing more to say."""
        self._reader.join(seconds)

    def _read(self) -> None:
        with self._socket.makefile("rb") as lines:
            for line in lines:
                self._follow(json.loads(line))
        if self._binding:
            os._exit(128 + signal.SIGKILL)

    def _follow(self, order: dict[str, Any]) -> None:
        if order["kind"] == "stop":
            self._leave(order["number"] or 128 + signal.SIGTERM)
        elif order["kind"] == "flight":
            nothing: list[dict[str, Any]] = []
            self.tell("flight", flights=tried(flight.recorded, nothing))
        elif order["kind"] == "standing":
            orders.note_standing(order["text"])
        elif order["kind"] == "preempt" and not orders.preempt(order["number"]):
            number = order["number"]
            handles = signal.getsignal(number) not in {signal.SIG_DFL, None}
            self.tell("cannot", number=number, handles=handles)

    def _leave(self, code: int) -> NoReturn:
        where, source = tried(self._standing_at, UNKNOWN)  # whatever that meets: this rank must go
        self.tell("waiting", where=where, source=source)
        flushing = threading.Thread(target=_flush, daemon=True)
        flushing.start()
        flushing.join(FLUSH_S)
        os._exit(code)

    def _standing_at(self) -> tuple[str | None, str | None]:
        frame = sys._current_frames().get(self._main or 0)  # noqa: SLF001  (documented; the name only looks private)
        return own_line(traceback.extract_stack(frame)) if frame is not None else (None, None)


class Pipe:
    """The other end: hears a rank and gives it orders.

    Args:
        stream: connected to the rank; taken, and never waited for.
    """

    def __init__(self, stream: socket.socket) -> None:
        stream.setblocking(False)
        self._socket = stream
        self._held = bytearray()
        self.ended = False  # the rank has closed its end

    def fileno(self) -> int:
        return self._socket.fileno()

    def take(self) -> tuple[list[dict[str, Any]], bool]:
        """Returns the messages that have come, and whether there may be more."""
        try:
            data = self._socket.recv(CHUNK)
        except BlockingIOError:
            return [], False
        except ConnectionResetError:
            data = b""
        self.ended = not data
        self._held += data
        if b"\n" not in data:  # a long message is not looked through again and again
            return [], bool(data)
        *lines, self._held = self._held.split(b"\n")
        return [json.loads(line) for line in lines], True

    def order(self, kind: str, number: int) -> None:
        """Gives an order; a rank that is gone gets none.

        Args:
            kind: "preempt" or "stop".
            number: of the signal that preempts; the exit code to stop with, 0 for that of one ended by SIGTERM.
        """
        self.send(kind, number=number)

    def send(self, kind: str, **body: Any) -> None:
        """Sends a message; what does not fit into the pipe at once is lost."""
        with contextlib.suppress(OSError):
            self._socket.send(json.dumps({"kind": kind, **body}).encode() + b"\n")

    def close(self) -> None:
        self._socket.close()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
