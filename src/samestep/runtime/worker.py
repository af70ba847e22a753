"""A thread that does one thing after another, for somebody who does not wait for it.

concurrent.futures has such threads too; python waits for them before it ends, and one that waits for a rank that is
gone would keep a script that has failed from saying so.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

__all__: list[str] = []

Act = Callable[[], object]
_here = threading.local()


def depth() -> int:
    """Returns the lane that this thread issues on: 0, or one more than the lane whose callback it is in."""
    found: int = getattr(_here, "depth", 0)
    return found


class WorkerThread:
    """A thread that does one thing after another; it starts with the first, and ends no process's end.

    Args:
        name: of the thread.
        depth: of the lane that it issues on.
    """

    def __init__(self, name: str, depth: int = 0) -> None:
        self._name = name
        self._depth = depth
        self._acts: deque[Act] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._busy = False
        self._closed = False

    def add(self, act: Act) -> None:
        """Has `act` done after all that was added before; it must not raise."""
        with self._changed:
            self._acts.append(act)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify()

    def do(self, act: Act) -> bool:
        """Does `act` here and now, unless something else comes first; then returns False."""
        with self._changed:
            if self._busy or self._acts:
                return False
            self._busy = True
        try:
            act()
        finally:
            self._rest()
        return True

    def close(self) -> None:
        """Ends the thread when it has done what it was given."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _work(self) -> None:
        _here.depth = self._depth
        while (act := self._next()) is not None:
            act()
            del act  # nothing of it is held while waiting for the next
            self._rest()

    def _next(self) -> Act | None:
        with self._changed:
            self._changed.wait_for(lambda: not self._busy and (self._acts or self._closed))
            if not self._acts:
                self._thread = None  # who adds something after all gets another
                return None
            self._busy = True
            return self._acts.popleft()

    def _rest(self) -> None:
        with self._changed:
            self._busy = False
            self._changed.notify()
