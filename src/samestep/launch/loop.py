"""One thread that waits on everything at once: processes, pipes, connections, signals and deadlines.

    watch(descriptor, then)       then() whenever it can be read, or has ended
    at(seconds, then) -> Alarm    then() once, so much later; alarm.cancel() takes it back

No polling, and no second thread: whoever forks must be alone in its process.
"""

from __future__ import annotations

import heapq
import itertools
import selectors
import time
from collections.abc import Callable
from dataclasses import dataclass, field

__all__: list[str] = []

Then = Callable[[], object]


@dataclass(order=True)
class Alarm:
    """A deadline that has not come yet."""

    due: float
    number: int
    then: Then = field(compare=False)
    cancelled: bool = field(default=False, compare=False)

    def cancel(self) -> None:
        self.cancelled = True


class Loop:
    """Calls back what happens, until told to stop."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._alarms: list[Alarm] = []
        self._numbers = itertools.count()
        self._stopped = False

    def watch(self, descriptor: int, then: Then, *, writable: bool = False) -> None:
        """Calls `then` whenever `descriptor` is readable, or writable too. Again: with new terms."""
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
        """Calls `then` once, `seconds` from now."""
        alarm = Alarm(time.monotonic() + seconds, next(self._numbers), then)
        heapq.heappush(self._alarms, alarm)
        return alarm

    def stop(self) -> None:
        """Makes :meth:`run` return after what it is doing now."""
        self._stopped = True

    def run(self) -> None:
        """Waits and calls back until :meth:`stop`."""
        self._stopped = False
        while not self._stopped:
            self.turn(None)

    def turn(self, timeout: float | None = 0.0) -> bool:
        """Takes one turn; returns whether any descriptor was ready.

        It waits at most `timeout` seconds, and never beyond the next deadline.
        """
        limits = [limit for limit in (timeout, self._patience()) if limit is not None]
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

    def _patience(self) -> float | None:
        while self._alarms and self._alarms[0].cancelled:
            heapq.heappop(self._alarms)
        return max(0.0, self._alarms[0].due - time.monotonic()) if self._alarms else None
