"""Frees those who wait for a collective that will never be done, where MPI itself cannot be interrupted.

A blocking call of MPI has no timeout and cannot be taken back. It runs on a thread of the group; who waits for it
waits for that thread, and is freed here when a rank that the call needs has left, or has not come in time. The thread
stays where it is until the process ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from samestep.errors import PeerError
from samestep.runtime.issuing import Task
from samestep.runtime.mpi.waiting import too_late

__all__: list[str] = []

LOOK_S = 0.2


@dataclass
class _Watched:
    task: Task
    check: Callable[[], None]
    timeout_s: float
    what: str
    since: float = field(default_factory=time.monotonic)

    def is_over(self) -> bool:
        """Whether nobody has to look at it any more."""
        if not self.task.is_completed():
            try:
                self.check()
            except PeerError as error:
                self.task.settle(error)
        waited = time.monotonic() - self.since
        if waited > self.timeout_s:
            self.task.settle(too_late(self.what, waited))
        return self.task.is_completed()


class Guard:
    """A thread that looks at tasks while there are any."""

    def __init__(self) -> None:
        self._watched: list[_Watched] = []
        self._thread: threading.Thread | None = None
        self._changed = threading.Lock()

    def watch(self, task: Task, check: Callable[[], None], timeout_s: float, what: str) -> None:
        """Looks at a task until it is done.

        Args:
            task: that is carried out by another thread.
            check: raises PeerError where the task will never be done.
            timeout_s: how long it may take.
            what: it is, and for whom it waits.
        """
        with self._changed:
            self._watched.append(_Watched(task, check, timeout_s, what))
            if self._thread is None:
                self._thread = threading.Thread(target=self._look, name="mpi guard", daemon=True)
                self._thread.start()

    def _look(self) -> None:
        while True:
            time.sleep(LOOK_S)
            with self._changed:
                self._watched = [each for each in self._watched if not each.is_over()]
                if not self._watched:
                    self._thread = None
                    return
