"""What carries the collectives of one lane of a process group out: shared memory, or plans.

    no algorithm asked for, all ranks on one host      all-reduce in shared memory
    an algorithm asked for                             its plans; messages are set up when the first one is needed

After an error the ranks are out of step, and the next sum would be one of tensors that do not belong together. So an
error is kept, and whatever comes later ends in it too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from torch import Tensor
from torch._C._distributed_c10d import Store

from samestep.collectives.board import has_total_store_order
from samestep.collectives.plan import Operation
from samestep.collectives.shared_memory import divide_
from samestep.errors import SamestepError
from samestep.runtime.group_memory import GroupMemory, Place
from samestep.runtime.group_messages import GroupMessages

__all__: list[str] = []


class Carrier:
    """What carries collectives out for one lane; every call is one that all ranks make, in the same order.

    Args:
        store: where the ranks find each other.
        place: of this rank.
        algorithm: how the names of the plans begin, or None: shared memory, where it can be had.
    """

    def __init__(self, store: Store, place: Place, algorithm: str | None) -> None:
        self._store = store
        self._place = place
        self._algorithm = algorithm or ""
        by_memory = algorithm is None and place.neighbours.is_one_host and has_total_store_order()
        self.memory = GroupMemory.opened_by(store, place) if by_memory else None
        self._messages: GroupMessages | None = None
        self._failed: SamestepError | None = None

    def all_reduce(self, tensors: Sequence[Tensor], op: str) -> None:
        """Adds each tensor over the ranks, in place.

        Raises:
            PeerError: a rank is gone.
            StepError: the ranks brought tensors that do not belong together.
        """
        for tensor in tensors:
            self._guarded(functools.partial(self._all_reduce, tensor.detach(), op))

    def _all_reduce(self, tensor: Tensor, op: str) -> None:
        if self.memory is not None:
            self.memory.all_reduce(tensor, op)
            return
        flat = tensor.reshape(-1)
        self.messages.run("all_reduce", flat)
        if op == "avg":
            divide_(flat, self._place.size)
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat.view_as(tensor))

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Gives all ranks what the root has, in place."""
        flat = tensor.detach().reshape(-1)
        self._guarded(lambda: self.messages.run("broadcast", flat, root))
        if flat.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(flat.view_as(tensor))

    def all_gather(self, into: Sequence[Tensor], mine: Tensor) -> None:
        """Puts the ranks' tensors into `into`, in rank order."""
        rows = self._rows("all_gather", mine)
        rows[self._place.rank, : mine.numel()] = mine.detach().reshape(-1)
        self._guarded(lambda: self.messages.run("all_gather", rows.view(-1)))
        for one, row in zip(into, rows, strict=True):
            one.detach().copy_(row[: mine.numel()].view_as(one))

    def reduce_scatter(self, into: Tensor, parts: Sequence[Tensor], op: str) -> None:
        """Puts the sum of the ranks' parts for this rank into `into`."""
        rows = self._rows("reduce_scatter", into)
        for row, part in zip(rows, parts, strict=True):
            row[: part.numel()] = part.detach().reshape(-1)
        self._guarded(lambda: self.messages.run("reduce_scatter", rows.view(-1)))
        mine = rows[self._place.rank, : into.numel()]
        if op == "avg":
            divide_(mine, self._place.size)
        into.detach().copy_(mine.view_as(into))

    def _rows(self, operation: Operation, like: Tensor) -> Tensor:
        """Memory with a row for each rank, of as many elements as the blocks of its share divide evenly."""
        ranks = self._place.size
        each = self.messages.plan(operation, ranks * like.nbytes).blocks // ranks
        return like.new_zeros(ranks, -(-like.numel() // each) * each)

    @property
    def messages(self) -> GroupMessages:
        """The group's own messages; opened when the first plan is carried out."""
        if self._messages is None:
            self._messages = GroupMessages(self._store, self._place, self._algorithm)
        return self._messages

    def _guarded(self, act: Callable[[], None]) -> None:
        """After an error the ranks are out of step: what comes later ends in the same error."""
        if self._failed is not None:
            raise self._failed
        try:
            act()
        except SamestepError as error:
            self._failed = error
            raise

    def leave(self) -> None:
        """Tells the others that this rank will not come any more."""
        if self.memory is not None:
            self.memory.leave()
