"""Operations under way: how they wait for MPI, who stops those that wait in vain, and point to point.

MPI libraries wait by spinning. Where each rank has a core that nothing else needs that is right ("blocking"); where
ranks share cores, the one that spins keeps the other from working, and a step takes twice as long as over gloo. Then
ranks poll, and sleep in between ("polling"). Yielding would do on an idle machine; beside other work it gives the core
away for milliseconds, whereas a sleeper is woken at once: 4 bytes took 3.7 ms and not 1.1 (gloo: 1.4) with two busy
processes on two cores, Open MPI 4.1.4.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from samestep.errors import PeerError, UsageError
from samestep.runtime.mpi.library import affinities
from samestep.runtime.mpi.shutdown import ShutdownProtocol
from samestep.runtime.mpi.tensors import copy_back, memory_of, pieces, to_host
from samestep.runtime.process_group.work import PendingWork, WorkerThread

MODES = ("blocking", "polling")
SPINNING_S = 20e-6  # polls without a pause
SHORTEST_S, GROWTH, LONGEST_S = 5e-6, 1.2, 300e-6  # pauses
SHARE = 0.02  # of the time waited so far that a pause may take
LIMIT_S = 0.01  # the longest pause of all
LIVENESS_INTERVAL_S = 0.2  # between checks for ranks that have left
BACKGROUND_S = (100e-6, 5e-3)  # the shortest and the longest pause between polls of messages that nobody waits for


def is_better_blocking(mpi: Any, communicator: Any, options: Mapping[str, str] | None) -> bool:
    """Returns whether the ranks of a communicator should wait inside MPI; the same on all. Collective."""
    given = {} if options is None else dict(options)
    mode = given.pop("waiting", None)
    if given or mode not in {None, *MODES}:
        raise UsageError(f"the backend mpi has one option, 'waiting', which is {' or '.join(map(repr, MODES))}")
    blocking = mode == "blocking"
    if mode is None:
        blocking = has_core_to_spare(affinities(mpi, communicator), torch.get_num_threads())
    return bool(communicator.allreduce(blocking, mpi.LAND))


def has_core_to_spare(cpus: Sequence[Sequence[int]], threads: int) -> bool:
    """Whether each rank of a host is bound to CPUs of its own, and to more than the threads that it computes with.

    >>> has_core_to_spare([[0, 1], [2, 3]], 1), has_core_to_spare([[0, 1], [0, 1]], 1)
    (True, False)
    """
    return all(len(each) > threads for each in cpus) and len(set().union(*cpus)) == sum(map(len, cpus))


def begin_event(what: str, tensors: Sequence[Tensor]) -> Callable[[], None] | None:
    """Begins an event of PyTorch's profiler, "mpi:all_reduce", as torch's backends do; None where nobody profiles.

    Returns what ends it. The profiler takes an event for asynchronous only if it ends on another thread, so while it
    is on, the thread that issues a collective never runs it.
    """
    if not torch.autograd._profiler_enabled():  # type: ignore[attr-defined]  # noqa: SLF001
        return None
    handle = torch.autograd._record_function_with_args_enter(f"mpi:{what}", *tensors)  # type: ignore[attr-defined]  # noqa: SLF001
    return functools.partial(torch.autograd._record_function_with_args_exit, handle)  # type: ignore[attr-defined]  # noqa: SLF001


def timeout_error(what: str, seconds: float) -> PeerError:
    """Returns the error of a call that has taken longer than it may.

    >>> timeout_error("all_reduce (call 17 of this group) for the other ranks", 60.01)
    PeerError('waited 60.0 s in all_reduce (call 17 of this group) for the other ranks; the timeout is over')
    """
    return PeerError(f"waited {seconds:.1f} s in {what}; the timeout is over")


@dataclass
class Waiting:
    blocking: bool  # in MPI itself
    timeout_s: float  # how long a call may take
    check: Callable[[], None]  # raises PeerError where a rank has left that the call needs
    what: str  # the call, and for whom it waits

    def until_done(self, requests: Sequence[Any]) -> None:
        only = requests[0]
        self.poll(only.Test if len(requests) == 1 else lambda: type(only).Testall(requests))

    def poll(self, done: Callable[[], bool]) -> None:
        """Returns when `done()` does: polls often at first, ever more seldom later."""
        began = checked = time.monotonic()
        pause = SHORTEST_S
        while not done():
            now = time.monotonic()
            if now - began < SPINNING_S:
                continue
            if now - checked > LIVENESS_INTERVAL_S or now - began > self.timeout_s:
                checked = now
                self.check()
                if now - began > self.timeout_s:
                    raise timeout_error(self.what, now - began)
            time.sleep(pause)
            pause = min(GROWTH * pause, max(LONGEST_S, min(SHARE * (now - began), LIMIT_S)))


@dataclass
class WatchedWork:
    """A collective that is failed when it cannot end any more, where MPI itself cannot be interrupted.

    A blocking call of MPI has no timeout and cannot be taken back. Those who wait for it are released here when a rank
    that it needs has left, or has not come in time; the thread in the call stays there until the process ends.
    """

    work: PendingWork
    check: Callable[[], None]
    timeout_s: float
    what: str
    since: float = field(default_factory=time.monotonic)

    def poll(self) -> bool:
        """Fails the work where it cannot end; returns whether it is over."""
        if not self.work.is_completed():
            try:
                self.check()
            except PeerError as error:
                self.work.finish(error)
        waited = time.monotonic() - self.since
        if waited > self.timeout_s:
            self.work.finish(timeout_error(self.what, waited))
        return self.work.is_completed()


class Poller:
    """A daemon thread that polls items until they are over, as long as there are any."""

    def __init__(self, name: str, shortest_s: float, longest_s: float) -> None:
        self._name = name
        self._pauses = shortest_s, longest_s
        self._items: deque[Any] = deque()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def add(self, item: Any) -> None:
        with self._lock:
            self._items.append(item)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def _run(self) -> None:
        pause, longest = self._pauses
        while True:
            time.sleep(pause)
            pause = min(2 * pause, longest)
            with self._lock:
                self._items = deque(item for item in self._items if not item.poll())
                if not self._items:
                    self._thread = None
                    return


class PointToPoint:
    """The messages of one group, over a communicator of their own, so that no tag of a script meets a collective's.

    `ranks` are the members' numbers in the world.
    """

    def __init__(
        self, mpi: Any, communicator: Any, name: str, ranks: Sequence[int], protocol: ShutdownProtocol, timeout_s: float
    ) -> None:
        self._mpi = mpi
        self._name = name
        self._communicator = communicator
        self._ranks = ranks
        self._protocol = protocol
        self._timeout_s = timeout_s
        self._callbacks = WorkerThread("mpi messages call back", 1)
        self._progress = Poller("mpi messages", *BACKGROUND_S)  # MPI moves messages only while somebody calls it
        self._highest_tag: int = communicator.Get_attr(mpi.TAG_UB)

    def send(self, tensor: Tensor, to: int, tag: int) -> Message:
        """Sends a tensor; its memory is the message's until it is done."""
        self._check(to, tag)
        message = self._message("send", f"for rank {self._ranks[to]}", tensor, {})
        self._protocol.count(self._key(self._communicator.rank, to))
        return self._post(message, [self._communicator.Isend(one, to, tag) for one in self._buffers(message.values)])

    def receive(self, tensor: Tensor, source: int, tag: int) -> Message:
        self._check(source, tag)
        key = self._key(source, self._communicator.rank)
        needed = {self._ranks[source]: (key, self._protocol.count(f"received {key}"))}
        message = self._message("recv", f"for rank {self._ranks[source]}", tensor, needed)
        message.source = self._ranks[source]
        return self._post(
            message, [self._communicator.Irecv(one, source, tag) for one in self._buffers(message.values)]
        )

    def receive_any(self, tensor: Tensor, tag: int) -> Message:
        """Receives a tensor from whichever rank of the group sends one first; its `source` says which.

        The later pieces of a long message come from the rank of the first.
        """
        self._check(0, tag)
        message = self._message("recvAnySource", "for any rank", tensor, {})
        status = self._mpi.Status()
        first, *others = self._buffers(message.values)
        request = self._communicator.Irecv(first, self._mpi.ANY_SOURCE, tag)

        def post_rest() -> list[Any] | None:
            if not request.Test(status):
                return None
            self._protocol.count(f"received {self._key(status.source, self._communicator.rank)}")
            message.source = self._ranks[status.source]
            return [self._communicator.Irecv(one, status.source, tag) for one in others]

        message.post_rest = post_rest
        return self._post(message, [])

    def close(self) -> None:
        self._callbacks.close()

    def _message(self, event: str, whom: str, tensor: Tensor, needed: Mapping[int, tuple[str, int]]) -> Message:
        what = "send" if event == "send" else "recv"
        check = functools.partial(self._protocol.check, what, needed)
        waiting = Waiting(blocking=False, timeout_s=self._timeout_s, check=check, what=f"{what} {whom}")
        return Message(tensor, waiting, self._callbacks, receives=what == "recv", event=event)

    def _post(self, message: Message, requests: list[Any]) -> Message:
        message.requests = requests
        self._progress.add(message)
        return message

    def _buffers(self, tensor: Tensor) -> list[Any]:
        """The buffers of a tensor's messages: one at least, for an empty tensor is a message too."""
        parts = list(pieces(tensor)) or [tensor.view(-1)]
        return [[memory_of(self._mpi, part), part.nbytes, self._mpi.BYTE] for part in parts]

    def _check(self, rank: int, tag: int) -> None:
        if not 0 <= rank < len(self._ranks):
            raise UsageError(f"there is no rank {rank} in a group of {len(self._ranks)}")
        if not 0 <= tag <= self._highest_tag:
            raise UsageError(f"the tag of a message is {tag}: this MPI has tags from 0 to {self._highest_tag}")

    def _key(self, source: int, to: int) -> str:
        return f"{self._name} {source} to {to}"


class Message(PendingWork):
    """One message under way; with `receives` its values are copied into the tensor at the end."""

    def __init__(
        self, tensor: Tensor, waiting: Waiting, callbacks: WorkerThread, *, receives: bool, event: str
    ) -> None:
        super().__init__([tensor], callbacks)
        self.source = -1  # the rank that sent it, by its number in the world, once it is known
        self.requests: list[Any] = []  # MPI's
        # for any source: posts the other pieces when the first has come, and returns None until then
        self.post_rest: Callable[[], list[Any] | None] | None = None
        self._end_event = begin_event(event, [tensor])
        self.values = to_host(tensor)  # what MPI reads or writes
        self._waiting = waiting
        self._receives = receives
        self._polling = threading.Lock()

    def poll(self) -> bool:
        """Asks MPI whether it is done, unless another thread does; returns whether it is."""
        if self.is_completed():
            return True
        if not self._polling.acquire(blocking=False):
            return False
        try:
            if not self.is_completed():
                self._poll()
        except Exception as error:  # noqa: BLE001  (raised again by those who wait)
            self.finish(error)
        finally:
            self._polling.release()
        return self.is_completed()

    def _poll(self) -> None:
        if self.post_rest is not None:
            rest = self.post_rest()
            if rest is None:
                return
            self.requests, self.post_rest = rest, None
        if all(request.Test() for request in self.requests):
            if self._receives:
                copy_back(self._tensors[0], self.values)
            if self._end_event is not None:
                self._end_event()
            self.finish()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        seconds = timeout.total_seconds()
        waiting = self._waiting if seconds <= 0 else replace(self._waiting, timeout_s=seconds)
        try:
            # a profiler's event must end on another thread: the poller's
            waiting.poll(self.poll if self._end_event is None else self.is_completed)
        except PeerError as error:
            self.finish(error)
        return super().wait()

    def source_rank(self) -> int:
        return self.source

    _source_rank = source_rank
