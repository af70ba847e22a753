"""Signals as events of a loop: a handler proper may interrupt anything, also a half-sent message."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Self

from samestep.launch.loop import Loop

__all__: list[str] = []

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)  # what a person or a scheduler sends


class Signals:
    """Brings signals that reach this process into its loop; a context manager, for the main thread.

    Args:
        loop: where they come in.
        numbers: which; those that are ignored stay so (`nohup samestep run …`).
        then: called with each, in the order of their coming.
    """

    def __init__(self, loop: Loop, numbers: Sequence[int], then: Callable[[int], None]) -> None:
        self._loop = loop
        self._then = then
        self._reader, self._writer = socket.socketpair()
        for end in (self._reader, self._writer):
            end.setblocking(False)
        self._numbers = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]

    def __enter__(self) -> Self:
        self._previous_wakeup = signal.set_wakeup_fd(self._writer.fileno())
        self._previous = {number: signal.signal(number, _nothing) for number in self._numbers}
        self._loop.watch(self._reader.fileno(), self._read)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.set_wakeup_fd(self._previous_wakeup)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._loop.forget(self._reader.fileno())
        self._reader.close()
        self._writer.close()

    def _read(self) -> None:
        for number in self._reader.recv(64):
            if number in self._numbers:
                self._then(number)


def _nothing(number: int, frame: FrameType | None) -> None:
    """A handler must exist for the wakeup descriptor to be written."""
