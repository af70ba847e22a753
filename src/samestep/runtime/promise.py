"""The future of a collective, whose callbacks run one after another on a thread of their own, in order.

torch's Future calls back in the thread that completes it, or in the one that attaches the callback if it is late: a
callback that issues collectives would issue them now from one thread, now from another, and on another rank in
another order (:mod:`samestep.runtime.issuing`).

Python cannot give such a future an error that C++ sees. So after a failure it holds something in place of tensors that
says what happened, whichever way C++ looks for tensors in it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

from torch.futures import Future

from samestep.errors import PeerError, StepError
from samestep.runtime.worker import Act, WorkerThread

__all__: list[str] = []


class Promise(Future[Any]):
    """A future whose callbacks run on one thread in the order in which they were attached.

    Args:
        calling: that thread.
        result: waits for the result and returns it, where that thread is not needed for it.
    """

    def __init__(self, calling: WorkerThread, result: Callable[[], Any] | None = None) -> None:
        super().__init__()
        self._calling = calling
        self._result = result
        self._kept = threading.Lock()
        self._attached: list[Act] | None = []  # None when they have been called

    def then(self, callback: Callable[[Any], Any]) -> Promise:
        """Returns the future of what `callback(this future)` will return."""
        child = Promise(self._calling)
        self._attach(lambda: child._take(callback, self))
        return child

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Has `callback(this future)` called; what it raises is shown, and that is all."""
        self._attach(lambda: _shown(callback, self))

    def wait(self) -> Any:
        """Returns the result; does not need the thread of the callbacks, so a callback may wait too."""
        return super().wait() if self._result is None else self._result()

    def set_result(self, result: Any) -> None:
        """Keeps the promise, and calls what was attached to it."""
        super().set_result(result)
        with self._kept:
            attached, self._attached = self._attached, None
        for act in attached or ():
            act()

    def fail(self, error: Exception) -> None:
        """Has Python's waiters raise `error`, and C++'s one that tells of it."""

        def raise_it(_: object) -> None:
            raise error

        super()._set_unwrap_func(raise_it)
        self.set_result(_Nothing(error))

    def _take(self, callback: Callable[[Any], Any], before: Promise) -> None:
        try:
            result = callback(before)
        except Exception as error:  # noqa: BLE001  (raised again by who waits)
            self.fail(error)
        else:
            self.set_result(result)

    def _attach(self, act: Act) -> None:
        with self._kept:
            if self._attached is not None:
                self._attached.append(act)
                return
        self._calling.add(act)


def _shown(callback: Callable[[Any], None], future: Promise) -> None:
    try:
        callback(future)
    except Exception:  # noqa: BLE001  (nobody waits who could be told)
        threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))


class _Nothing:
    """In place of tensors that never came. C++ looks for tensors in it, in one of two ways, and says what it found."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __repr__(self) -> str:
        # what the launcher knows a lost peer by: see samestep.launch.failure.LOST_PEER
        lost = "peer is gone: " if isinstance(self._error, PeerError) else ""
        return f"nothing, for {lost}{self._error}"

    def __reduce_ex__(self, _: object) -> str:
        raise StepError(repr(self))
