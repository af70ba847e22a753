"""One thread that waits for processes, pipes, connections, signals and deadlines.

There is no second thread: a process that forks must have only one. Importing asyncio would take 100 ms.
"""

from __future__ import annotations

import heapq
import itertools
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)  # what a person or a scheduler sends

Then = Callable[[], object]


@dataclass(order=True)
class Alarm:
    due: float
    number: int
    then: Then = field(compare=False)
    cancelled: bool = field(default=False, compare=False)

    def cancel(self) -> None:
        self.cancelled = True


class Loop:
    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._alarms: list[Alarm] = []
        self._numbers = itertools.count()
        self._stopped = False

    def watch(self, descriptor: int, then: Then, *, writable: bool = False) -> None:
        """Calls `then` whenever `descriptor` is readable, or writable too; replaces an earlier call for it."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if writable else 0)
        if descriptor in self._selector.get_map():
            self._selector.modify(descriptor, events, then)
        else:
            self._selector.register(descriptor, events, then)

    def forget(self, descriptor: int) -> None:
        """Watches it no more. Call it before the descriptor is closed."""
        if descriptor in self._selector.get_map():
            self._selector.unregister(descriptor)

    def at(self, seconds: float, then: Then) -> Alarm:
        alarm = Alarm(time.monotonic() + seconds, next(self._numbers), then)
        heapq.heappush(self._alarms, alarm)
        return alarm

    def stop(self) -> None:
        """Makes :meth:`run` return after the callback that runs now."""
        self._stopped = True

    def run(self) -> None:
        self._stopped = False
        while not self._stopped:
            self.turn(None)

    def turn(self, timeout: float | None = 0.0) -> bool:
        """Waits once, at most `timeout` seconds and never beyond the next deadline, and calls back what is due.

        Returns whether any descriptor was ready.
        """
        limits = [limit for limit in (timeout, self._until_next()) if limit is not None]
        ready = self._selector.select(min(limits, default=None))
        for key, _ in ready:
            if key.fd in self._selector.get_map() and self._selector.get_map()[key.fd].data is key.data:
                key.data()  # unless an earlier one of this turn took it off
        while self._alarms and self._alarms[0].due <= time.monotonic():
            alarm = heapq.heappop(self._alarms)
            if not alarm.cancelled:
                alarm.then()
        return bool(ready)

    def close(self) -> None:
        self._selector.close()

    def _until_next(self) -> float | None:
        while self._alarms and self._alarms[0].cancelled:
            heapq.heappop(self._alarms)
        return max(0.0, self._alarms[0].due - time.monotonic()) if self._alarms else None


@contextmanager
def signals(loop: Loop, numbers: Sequence[int], then: Callable[[int], None]) -> Iterator[None]:
    """Makes signals events of a loop; for the main thread. A handler proper may interrupt a half-sent message.

    Those that are ignored stay so (`nohup samestep run …`).
    """
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)
    caught = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]

    def read() -> None:
        for number in reader.recv(64):
            if number in caught:
                then(number)

    wakeup = signal.set_wakeup_fd(writer.fileno())  # which is written for signals that have a handler
    handlers = {number: signal.signal(number, lambda *_: None) for number in caught}
    loop.watch(reader.fileno(), read)
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        loop.forget(reader.fileno())
        reader.close()
        writer.close()
