"""Collectives of one group, carried out one after another in the order in which they were issued.

The ranks must agree on that order, or they would add each other's tensors up. Two things make them disagree: the
thread that carries a collective out is not the one that issued it, and what is called back when it is done may issue
more. So three kinds of threads, which never do each other's work:

    issuing     backward's thread     issue a   issue b                     wait
    lane 0      carries out                     a──────a b──────b
    lane 0      calls back                             cb(a): issue c, wait ────┐ cb(b): issue d, wait
    lane 1      carries out                                   c──────c          └──── d──────d

What a callback issues takes a lane of its own, one deeper, with messages of its own: whether the backward has issued b
before cb(a) issues c is chance, and differs between ranks. Callbacks run in the order in which they were attached,
never within the thread that attaches them, although the result may be there already (:mod:`samestep.runtime.promise`).
PyTorch's gloo calls back from any of its two threads: PowerSGD with two buckets stands still over it.

A collective that is waited for at once is carried out by the thread that issues it, which saves two handings over.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from samestep.errors import PeerError, StepError
from samestep.runtime.promise import Promise
from samestep.runtime.worker import Act, WorkerThread, depth

__all__: list[str] = []


class Lane:
    """Where collectives of one group wait for each other, and their callbacks for theirs.

    Args:
        name: of the group.
        depth: 0 for what is issued by the script, one more for what is issued by the callbacks of that, and so on.
    """

    def __init__(self, name: str, depth: int) -> None:
        self.carrying = WorkerThread(f"{name} carries {depth}")
        self.calling = WorkerThread(f"{name} calls back {depth}", depth + 1)

    def issue(self, act: Act, tensors: Sequence[Tensor], *, at_once: bool) -> Task:
        """Carries `act` out after all that was issued before.

        Args:
            act: raises if it fails.
            tensors: that the result lies in.
            at_once: the caller waits for it anyway.
        """
        task = Task(act, tensors, self.calling)
        if not (at_once and self.carrying.do(task.carry_out)):
            self.carrying.add(task.carry_out)
        return task

    def close(self) -> None:
        """Ends the threads when they have done what they were given."""
        self.carrying.close()
        self.calling.close()


class Lanes:
    """The lanes of one group, each made when the first is issued on it.

    Args:
        name: of the group.
        ranks: its members' numbers in the world.
    """

    def __init__(self, name: str, ranks: Sequence[int]) -> None:
        self._name = name
        self._ranks = list(ranks)
        self._lock = threading.Lock()
        self._lanes: list[Lane] | None = []

    def here(self) -> tuple[int, Lane]:
        """Returns the lane that this thread issues on, and its depth.

        Raises:
            StepError: the group is destroyed.
        """
        with self._lock:
            self.check_open()
            assert self._lanes is not None
            while len(self._lanes) <= depth():
                self._lanes.append(Lane(self._name, len(self._lanes)))
            return depth(), self._lanes[depth()]

    def check_open(self) -> None:
        """Raises StepError where the group is destroyed."""
        if self._lanes is None:
            raise StepError(f"the process group of ranks {self._ranks} is destroyed: make a new one")

    def close(self) -> None:
        """Takes nothing more, and ends the threads when they have done what they were given."""
        with self._lock:
            lanes, self._lanes = self._lanes or [], None
        for lane in lanes:
            lane.close()


class Pending(dist.Work):
    """Something under way: what `async_op=True` returns.

    `wait` raises what went wrong, in every thread that waits. C++ asks for `wait` and `get_future` only.

    Args:
        tensors: that the result lies in.
        calling: the thread for what is called back.
    """

    def __init__(self, tensors: Sequence[Tensor], calling: WorkerThread) -> None:
        super().__init__()
        self._tensors = list(tensors)
        self._calling = calling
        self._done = threading.Event()
        self._error: Exception | None = None
        self._promise: Promise | None = None
        self._lock = threading.Lock()

    def settle(self, error: Exception | None = None) -> None:
        """Tells everybody who waits that it is done, or why it never will be; the first word counts."""
        with self._lock:
            if self._done.is_set():
                return
            self._error = error
            self._done.set()
            promise = self._promise
        if promise is not None:
            self._calling.add(lambda: self._keep(promise))

    def _keep(self, promise: Promise) -> None:
        promise.fail(self._error) if self._error is not None else promise.set_result(self._tensors)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Returns when the result is there.

        Raises:
            PeerError: a rank is gone, or did not come within `timeout` (0: the group's own).
        """
        seconds = timeout.total_seconds()
        if not self._done.wait(seconds if seconds > 0 else None):
            raise PeerError(f"waited {seconds:g} s for the other ranks of a collective")
        if self._error is not None:
            raise self._error
        return True

    def get_future(self) -> Promise:
        """Returns the future of the tensors; its callbacks run one after another on a thread of their own."""
        with self._lock:
            if self._promise is not None:
                return self._promise
            promise = self._promise = Promise(self._calling, self._result)
            done = self._done.is_set()
        if done:
            self._keep(promise)
        return promise

    def _result(self) -> list[Tensor]:
        self.wait()
        return self._tensors

    def is_completed(self) -> bool:
        """Whether it is done, well or not."""
        return self._done.is_set()

    def is_success(self) -> bool:
        """Whether it is done, and well."""
        return self._done.is_set() and self._error is None

    def exception(self) -> Exception | None:
        """Returns what went wrong."""
        return self._error

    def result(self) -> list[Tensor]:
        """Returns the tensors that the result lies in."""
        return self._tensors

    def synchronize(self) -> None:
        """Returns when the result is there; on the CPU nothing else can run ahead of it."""
        self.wait()


class Task(Pending):
    """One collective under way."""

    def __init__(self, act: Act, tensors: Sequence[Tensor], calling: WorkerThread) -> None:
        super().__init__(tensors, calling)
        self._act: Act | None = act

    def carry_out(self) -> None:
        """Does it, and tells everybody who waits."""
        act, self._act = self._act, None
        assert act is not None
        try:
            act()
        except Exception as error:  # noqa: BLE001  (raised again by who waits)
            self.settle(error)
        else:
            self.settle()
