"""Point to point: messages between two ranks, in no order but their own.

    isend, irecv        posted at once, done whenever the other side is; a thread looks after those nobody waits for
    wait                looks by itself, quicker
    any source          a long message's later pieces come from whom the first one came from

A communicator of its own, so that no tag of a script meets a collective's.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor

from samestep.errors import PeerError, UsageError
from samestep.runtime.issuing import Pending
from samestep.runtime.mpi import calls, profiled, staging
from samestep.runtime.mpi.ending import Ending
from samestep.runtime.mpi.waiting import Waiting
from samestep.runtime.worker import WorkerThread

__all__: list[str] = []

LOOKS_S = (100e-6, 5e-3)  # the shortest and the longest pause between looks at messages that nobody waits for


class Messages:
    """The messages of one group.

    Args:
        mpi: the library.
        communicator: of the group's ranks, for messages alone.
        name: of the group.
        names: the ranks' numbers in the world.
        ending: of this process.
        timeout_s: how long a message may take.
    """

    def __init__(
        self, mpi: Any, communicator: Any, name: str, names: Sequence[int], ending: Ending, timeout_s: float
    ) -> None:
        self._mpi = mpi
        self._name = name
        self._communicator = communicator
        self._names = names
        self._ending = ending
        self._timeout_s = timeout_s
        self._calling = WorkerThread("mpi messages call back", 1)
        self._looking = _Looking()
        self._highest: int = communicator.Get_attr(mpi.TAG_UB)

    def send(self, tensor: Tensor, to: int, tag: int) -> Message:
        """Sends a tensor; the memory is the message's until it is done."""
        to = self._member(to)
        ended = profiled.begun("send", [tensor])
        values = staging.staged(tensor)
        self._ending.count(self._key(self._communicator.rank, to))
        requests = [self._communicator.Isend(piece, to, self._tag(tag)) for piece in self._pieces(values)]
        waiting = self._waiting("send", f"for rank {self._names[to]}", {})
        return self._posted(Message(tensor, values, requests, waiting, self._calling, ended=ended))

    def receive(self, tensor: Tensor, source: int, tag: int) -> Message:
        """Receives a tensor from a rank of the group."""
        source = self._member(source)
        ended = profiled.begun("recv", [tensor])
        values = staging.staged(tensor)
        number = self._ending.count(f"received {self._key(source, self._communicator.rank)}")
        came = {self._names[source]: (self._key(source, self._communicator.rank), number)}
        requests = [self._communicator.Irecv(piece, source, self._tag(tag)) for piece in self._pieces(values)]
        waiting = self._waiting("recv", f"for rank {self._names[source]}", came)
        message = Message(tensor, values, requests, waiting, self._calling, back=True, ended=ended)
        message.source = self._names[source]
        return self._posted(message)

    def receive_any(self, tensor: Tensor, tag: int) -> Message:
        """Receives a tensor from whichever rank of the group sends one first; its `source` says which."""
        ended = profiled.begun("recvAnySource", [tensor])
        values = staging.staged(tensor)
        first, *others = self._pieces(values)
        request = self._communicator.Irecv(first, self._mpi.ANY_SOURCE, self._tag(tag))

        status = self._mpi.Status()

        def rest() -> list[Any]:
            self._ending.count(f"received {self._key(status.source, self._communicator.rank)}")
            message.source = self._names[status.source]
            return [self._communicator.Irecv(piece, status.source, self._tag(tag)) for piece in others]

        waiting = self._waiting("recv", "for any rank", {})
        message = Message(
            tensor, values, [request], waiting, self._calling, back=True, ended=ended, rest=rest, status=status
        )
        return self._posted(message)

    def close(self) -> None:
        """Ends the thread of what is called back when it has done what it was given."""
        self._calling.close()

    def _posted(self, message: Message) -> Message:
        self._looking.look_after(message)
        return message

    def _pieces(self, tensor: Tensor) -> list[Any]:
        """The buffers of a tensor's messages: one at least, for an empty tensor is a message too."""
        flat = tensor.view(-1)
        each = max(1, calls.PIECE // tensor.element_size())
        parts = [flat[start : start + each] for start in range(0, max(1, flat.numel()), each)]
        return [[calls.memory_of(self._mpi, part), part.nbytes, self._mpi.BYTE] for part in parts]

    def _waiting(self, what: str, whom: str, came: Mapping[int, tuple[str, int]]) -> Waiting:
        return Waiting(
            blocking=False,
            timeout_s=self._timeout_s,
            check=lambda: self._ending.check(what, came),
            what=f"{what} {whom}",
        )

    def _member(self, rank: int) -> int:
        if not 0 <= rank < len(self._names):
            raise UsageError(f"there is no rank {rank} in a group of {len(self._names)}")
        return rank

    def _key(self, source: int, to: int) -> str:
        return f"{self._name} {source} to {to}"

    def _tag(self, tag: int) -> int:
        if not 0 <= tag <= self._highest:
            raise UsageError(f"the tag of a message is {tag}: this MPI has tags from 0 to {self._highest}")
        return tag


class Message(Pending):
    """One message under way.

    Args:
        tensor: that was given.
        values: what MPI reads or writes.
        requests: MPI's.
        waiting: until they are done.
        calling: the thread for what is called back.
        back: the values are brought into the tensor at the end.
        ended: ends its event for the profiler, on another thread than the caller's.
        rest: posts the message's other pieces when the first has come.
        status: where MPI writes whom the first has come from.

    Attributes:
        source: who has sent it, by its number in the world; -1 until it is known.
    """

    def __init__(
        self,
        tensor: Tensor,
        values: Tensor,
        requests: list[Any],
        waiting: Waiting,
        calling: WorkerThread,
        *,
        back: bool = False,
        ended: Callable[[], None] | None = None,
        rest: Callable[[], list[Any]] | None = None,
        status: Any = None,
    ) -> None:
        super().__init__([tensor], calling)
        self.source = -1
        self._values = values
        self._requests = requests
        self._waiting = waiting
        self._back = back
        self._ended = ended
        self._rest = rest
        self._status = status
        self._looked = threading.Lock()

    def look(self) -> bool:
        """Looks whether MPI is done with it, unless another thread does; returns whether it is done."""
        if self.is_completed():
            return True
        if not self._looked.acquire(blocking=False):
            return False
        try:
            if not self.is_completed():
                self._look()
        except Exception as error:  # noqa: BLE001  (raised again by who waits)
            self.settle(error)
        finally:
            self._looked.release()
        return self.is_completed()

    def _look(self) -> None:
        if self._rest is not None and self._requests[0].Test(self._status):
            self._requests, self._rest = self._rest(), None
        if self._rest is None and all(request.Test() for request in self._requests):
            if self._back:
                staging.put_back(self._tensors[0], self._values)
            if self._ended is not None:
                self._ended()
            self.settle()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Returns when it is done.

        Raises:
            PeerError: the other rank is gone, or did not come within `timeout` (0: the group's own).
        """
        seconds = timeout.total_seconds()
        waiting = self._waiting if seconds <= 0 else self._waiting.within(seconds)
        try:
            waiting.until(self.look if self._ended is None else self.is_completed)
        except PeerError as error:
            self.settle(error)
        return super().wait()

    def _source_rank(self) -> int:
        return self.source

    def source_rank(self) -> int:
        """Returns the number in the world of the rank that has sent it."""
        return self.source


class _Looking:
    """A thread that looks after messages while there are any: MPI moves them only while somebody calls it."""

    def __init__(self) -> None:
        self._messages: deque[Message] = deque()
        self._thread: threading.Thread | None = None
        self._changed = threading.Lock()

    def look_after(self, message: Message) -> None:
        with self._changed:
            self._messages.append(message)
            if self._thread is None:
                self._thread = threading.Thread(target=self._look, name="mpi messages", daemon=True)
                self._thread.start()

    def _look(self) -> None:
        pause = LOOKS_S[0]
        while True:
            time.sleep(pause)
            pause = min(2 * pause, LOOKS_S[1])
            with self._changed:
                self._messages = deque(message for message in self._messages if not message.look())
                if not self._messages:
                    self._thread = None
                    return
