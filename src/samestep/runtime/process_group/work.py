"""Collectives of one group, run one after another in the order in which they were issued.

The ranks must agree on that order, or they would add up each other's tensors. Two things make them disagree: the
thread that runs a collective is not the one that issued it, and callbacks of a finished one may issue more. So each
queue has a thread that runs and a thread that calls back, and what a callback issues goes to a queue of its own, one
deeper, with messages of its own: whether backward has issued b before the callback of a issues c is chance, and
differs between ranks (PyTorch's gloo calls back from any of its two threads: PowerSGD with two buckets hangs over it).
A collective that is waited for at once is run by the thread that issues it, which saves two changes of thread.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from samestep.errors import PeerError, StepError

_thread_state = threading.local()  # of a thread that calls back: `depth` of the queue on which the callbacks issue


class WorkerThread:
    """A daemon thread that runs one call after another; it starts with the first.

    Python waits for the threads of concurrent.futures before it exits, and one that waits for a rank that is gone
    would keep a failed script from ending. `depth` is that of the queue on which its calls issue.
    """

    def __init__(self, name: str, depth: int = 0) -> None:
        self._name = name
        self._depth = depth
        self._calls: deque[Callable[[], object]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._busy = False
        self._closed = False

    def add(self, call: Callable[[], object]) -> None:
        """Runs `call`, which must not raise, after all that was added before."""
        with self._changed:
            self._calls.append(call)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify()

    def run_here(self, call: Callable[[], object]) -> bool:
        """Runs `call` in this thread at once, unless something else comes first; then returns False."""
        with self._changed:
            if self._busy or self._calls:
                return False
            self._busy = True
        try:
            call()
        finally:
            self._finish()
        return True

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _run(self) -> None:
        _thread_state.depth = self._depth
        while (call := self._next()) is not None:
            call()
            del call  # or its tensors would live while this thread waits for the next
            self._finish()

    def _next(self) -> Callable[[], object] | None:
        with self._changed:
            self._changed.wait_for(lambda: not self._busy and (self._calls or self._closed))
            if not self._calls:
                self._thread = None  # a later call gets another
                return None
            self._busy = True
            return self._calls.popleft()

    def _finish(self) -> None:
        with self._changed:
            self._busy = False
            self._changed.notify()


class OrderedFuture(Future[Any]):
    """A future whose callbacks run on one thread in the order in which they were attached.

    torch's Future calls back in the thread that completes it, or in the one that attaches a late callback: callbacks
    that issue collectives would issue them in another order on another rank. `result` waits for the result and
    returns it, where the thread is not needed for it.
    """

    def __init__(self, thread: WorkerThread, result: Callable[[], Any] | None = None) -> None:
        super().__init__()
        self._thread = thread
        self._result = result
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], object]] | None = []  # None when they have been called

    def then(self, callback: Callable[[Any], Any]) -> OrderedFuture:
        """Returns the future of what `callback(this future)` will return."""
        child = OrderedFuture(self._thread)
        self._attach(lambda: child._complete(callback, self))
        return child

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Calls `callback(this future)` when it is done; what the callback raises is only shown."""
        self._attach(lambda: _call_and_show(callback, self))

    def wait(self) -> Any:
        """Returns the result; does not need the thread of the callbacks, so a callback may wait too."""
        return super().wait() if self._result is None else self._result()

    def set_result(self, result: Any) -> None:
        super().set_result(result)
        with self._lock:
            callbacks, self._callbacks = self._callbacks, None
        for call in callbacks or ():
            call()

    def fail(self, error: Exception) -> None:
        """Completes the future with an error.

        Python cannot give a future an error that C++ sees: there the future holds a marker in place of tensors, whose
        text tells the error.
        """

        def raise_it(_: object) -> None:
            raise error

        super()._set_unwrap_func(raise_it)
        self.set_result(_ErrorMarker(error))

    def _complete(self, callback: Callable[[Any], Any], before: OrderedFuture) -> None:
        try:
            result = callback(before)
        except Exception as error:  # noqa: BLE001  (raised again by those who wait)
            self.fail(error)
        else:
            self.set_result(result)

    def _attach(self, call: Callable[[], object]) -> None:
        with self._lock:
            if self._callbacks is not None:
                self._callbacks.append(call)
                return
        self._thread.add(call)


def _call_and_show(callback: Callable[[Any], None], future: OrderedFuture) -> None:
    try:
        callback(future)
    except Exception:  # noqa: BLE001  (no caller is left to raise it to)
        threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))


class _ErrorMarker:
    """In place of tensors that never came. C++ looks for tensors in it, in one of two ways, and shows what it found."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __repr__(self) -> str:
        # the launcher recognises a lost peer by this text: see samestep.launch.rank.failure.LOST_PEER
        lost = "peer is gone: " if isinstance(self._error, PeerError) else ""
        return f"nothing, for {lost}{self._error}"

    def __reduce_ex__(self, _: object) -> str:
        raise StepError(repr(self))


class PendingWork(dist.Work):
    """An operation under way: what `async_op=True` returns.

    `wait` raises what went wrong, in every thread that waits. C++ asks for `wait` and `get_future` only.
    """

    def __init__(self, tensors: Sequence[Tensor], callbacks: WorkerThread) -> None:
        super().__init__()
        self._tensors = list(tensors)
        self._callbacks = callbacks
        self._done = threading.Event()
        self._error: Exception | None = None
        self._future: OrderedFuture | None = None
        self._lock = threading.Lock()

    def finish(self, error: Exception | None = None) -> None:
        """Marks it as done, or as failed; only the first call counts."""
        with self._lock:
            if self._done.is_set():
                return
            self._error = error
            self._done.set()
            future = self._future
        if future is not None:
            self._callbacks.add(lambda: self._complete(future))

    def _complete(self, future: OrderedFuture) -> None:
        if self._error is not None:
            future.fail(self._error)
        else:
            future.set_result(self._tensors)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        seconds = timeout.total_seconds()
        if not self._done.wait(seconds if seconds > 0 else None):
            raise PeerError(f"waited {seconds:g} s for the other ranks of a collective")
        if self._error is not None:
            raise self._error
        return True

    def get_future(self) -> OrderedFuture:
        with self._lock:
            if self._future is not None:
                return self._future
            future = self._future = OrderedFuture(self._callbacks, self._wait_for_tensors)
            done = self._done.is_set()
        if done:
            self._complete(future)
        return future

    def _wait_for_tensors(self) -> list[Tensor]:
        self.wait()
        return self._tensors

    def is_completed(self) -> bool:
        return self._done.is_set()

    def is_success(self) -> bool:
        return self._done.is_set() and self._error is None

    def exception(self) -> Exception | None:
        return self._error

    def result(self) -> list[Tensor]:
        return self._tensors

    def synchronize(self) -> None:
        """Returns when the result is there; on the CPU nothing else can run ahead of it."""
        self.wait()


class OperationQueue:
    """The operations of one group that were issued at one depth of callbacks."""

    def __init__(self, name: str, depth: int) -> None:
        self._runner = WorkerThread(f"{name} runs {depth}")
        self._callbacks = WorkerThread(f"{name} calls back {depth}", depth + 1)

    def issue(self, operation: Callable[[], object], tensors: Sequence[Tensor], *, at_once: bool) -> PendingWork:
        """Runs `operation`, which raises if it fails, after all that was issued before."""
        work = PendingWork(tensors, self._callbacks)

        def run() -> None:
            try:
                operation()
            except Exception as error:  # noqa: BLE001  (raised again by those who wait)
                work.finish(error)
            else:
                work.finish()

        if not (at_once and self._runner.run_here(run)):
            self._runner.add(run)
        return work

    def close(self) -> None:
        self._runner.close()
        self._callbacks.close()


class OperationQueues:
    """The queues of one group, by depth of callbacks, each made when it is first needed."""

    def __init__(self, name: str, ranks: Sequence[int]) -> None:
        self._name = name
        self._ranks = list(ranks)
        self._lock = threading.Lock()
        self._queues: list[OperationQueue] | None = []

    def current(self) -> tuple[int, OperationQueue]:
        depth: int = getattr(_thread_state, "depth", 0)
        with self._lock:
            self.check_open()
            assert self._queues is not None
            while len(self._queues) <= depth:
                self._queues.append(OperationQueue(self._name, len(self._queues)))
            return depth, self._queues[depth]

    def check_open(self) -> None:
        """Raises StepError where the group is destroyed."""
        if self._queues is None:
            raise StepError(f"the process group of ranks {self._ranks} is destroyed: make a new one")

    def close(self) -> None:
        with self._lock:
            queues, self._queues = self._queues or [], None
        for queue in queues:
            queue.close()
