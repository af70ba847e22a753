"""The collectives of one communicator, on tensors in host memory whose elements lie one after another.

Reductions are MPI's own, in pieces that the cache holds. What only moves is bytes. MPI counts in 32 bits: beyond
PIECE it goes in pieces, broadcasts one after another, and the others as messages between each two ranks, all at once:

    all-gather of 3 ranks, 5 GiB each        rank 0 -> 1: 1 GiB, 1 GiB, 1 GiB, 1 GiB, 1 GiB        rank 0 -> 2: …
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from samestep.runtime.mpi.datatypes import as_added, datatype, divide, operation
from samestep.runtime.mpi.waiting import Waiting

__all__: list[str] = []

PIECE = 1 << 30  # bytes
ADDED = 4 << 20  # of a reduction: what MPI takes beside it stays in the cache; 100 MiB take half the time


class Calls:
    """The collectives of one communicator; all its ranks must make the same calls in the same order.

    Args:
        mpi: the library.
        communicator: of the ranks, in their order.
        waiting: until a call is done.

    Attributes:
        waiting: until a call is done.
    """

    def __init__(self, mpi: Any, communicator: Any, waiting: Waiting) -> None:
        self._mpi = mpi
        self._communicator = communicator
        self.waiting = waiting
        self._rank: int = communicator.rank
        self._size: int = communicator.size

    def all_reduce(self, tensor: Tensor, op: str) -> None:
        """Adds a tensor over the ranks, in place."""
        self._reduced(tensor, op, "Allreduce")

    def reduce(self, tensor: Tensor, op: str, root: int) -> None:
        """Adds a tensor over the ranks, in place on the root; elsewhere it is left alone."""
        if self._rank == root:
            self._reduced(tensor, op, "Reduce", root)
            return
        wide = as_added(tensor)
        for piece in self._pieces(wide, ADDED):
            self._do("Reduce", self._typed(piece), None, operation(self._mpi, op, wide.dtype), root)

    def _reduced(self, tensor: Tensor, op: str, name: str, *root: int) -> None:
        wide = as_added(tensor)
        for piece in self._pieces(wide, ADDED):
            self._do(name, self._mpi.IN_PLACE, self._typed(piece), operation(self._mpi, op, wide.dtype), *root)
        if op == "avg":
            divide(wide, self._size)
        if wide is not tensor:
            tensor.copy_(wide)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Gives all ranks what the root has, in place."""
        for piece in self._pieces(tensor):
            self._do("Bcast", self._bytes(piece), root)

    def all_gather(self, rows: Tensor, mine: Tensor) -> None:
        """Puts the ranks' tensors into the rows of `rows`, in rank order."""
        if mine.untyped_storage().data_ptr() == rows.untyped_storage().data_ptr():  # which MPI refuses; FSDP does it
            mine = mine.clone()
        if mine.nbytes <= PIECE:
            self._do("Allgather", self._bytes(mine), self._bytes(rows, mine.nbytes))
            return
        row = rows.view(self._size, -1)
        self.exchange(dict.fromkeys(self._others, mine), {rank: row[rank] for rank in self._others})
        row[self._rank].copy_(mine.view(-1))

    def gather(self, rows: Tensor | None, mine: Tensor, root: int) -> None:
        """Puts the ranks' tensors into the rows of the root's `rows`; None elsewhere."""
        if mine.nbytes <= PIECE:
            into = None if rows is None else self._bytes(rows, mine.nbytes)
            self._do("Gather", self._bytes(mine), into, root)
            return
        if rows is None:
            self.exchange({root: mine}, {})
            return
        row = rows.view(self._size, -1)
        self.exchange({}, {rank: row[rank] for rank in self._others})
        row[self._rank].copy_(mine.view(-1))

    def scatter(self, mine: Tensor, rows: Tensor | None, root: int) -> None:
        """Gives each rank its row of the root's `rows`; None elsewhere."""
        if mine.nbytes <= PIECE:
            parts = None if rows is None else self._bytes(rows, mine.nbytes)
            self._do("Scatter", parts, self._bytes(mine), root)
            return
        if rows is None:
            self.exchange({}, {root: mine})
            return
        row = rows.view(self._size, -1)
        self.exchange({rank: row[rank] for rank in self._others}, {})
        mine.view(-1).copy_(row[self._rank])

    def reduce_scatter(self, mine: Tensor, parts: Sequence[Tensor], op: str) -> None:
        """Puts the sum of the ranks' parts for this rank into `mine`; parts may differ in length."""
        alike = all(part.numel() == mine.numel() for part in parts) and mine.nbytes <= PIECE
        if alike:
            rows = as_added(torch.cat([part.reshape(-1) for part in parts]))
            into = torch.empty(mine.numel(), dtype=rows.dtype)
            added = operation(self._mpi, op, rows.dtype)
            self._do("Reduce_scatter_block", self._typed(rows, into.numel()), self._typed(into), added)
            if op == "avg":
                divide(into, self._size)
            mine.copy_(into.view_as(mine))
            return
        for owner, part in enumerate(parts):
            sums = part.clone()
            self.reduce(sums, op, owner)
            if owner == self._rank:
                mine.copy_(sums.view_as(mine))

    def barrier(self) -> None:
        """Waits for all ranks."""
        self._do("Barrier")

    def exchange(self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]) -> None:
        """Sends a tensor to each of some ranks and receives one from each of others; a rank's own is copied."""
        if self._rank in sent:
            received[self._rank].view(-1).view(torch.uint8).copy_(sent[self._rank].reshape(-1).view(torch.uint8))
        requests = [
            self._communicator.Irecv(self._bytes(piece), rank)
            for rank, tensor in received.items()
            for piece in self._pieces(tensor)
            if rank != self._rank
        ]
        requests += [
            self._communicator.Isend(self._bytes(piece), rank)
            for rank, tensor in sent.items()
            for piece in self._pieces(tensor)
            if rank != self._rank
        ]
        if requests:
            self.waiting.until_done(requests)

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(self._size) if rank != self._rank]

    def _do(self, name: str, *arguments: Any) -> None:
        """Calls MPI, as the waiting wants it: `Allreduce`, or `Iallreduce` and a look now and then."""
        if self.waiting.blocking:
            getattr(self._communicator, name)(*arguments)
        else:
            started = getattr(self._communicator, f"I{name[0].lower()}{name[1:]}")(*arguments)
            self.waiting.until_done([started])

    def _pieces(self, tensor: Tensor, most: int = PIECE) -> Iterator[Tensor]:
        """Yields what is sent in one message each: nothing of an empty tensor."""
        flat = tensor.view(-1)
        each = max(1, min(most, PIECE) // tensor.element_size())
        for start in range(0, flat.numel(), each):
            yield flat[start : start + each]

    def _typed(self, tensor: Tensor, each: int | None = None) -> list[Any]:
        """A buffer of numbers; `each` is what one rank has of it."""
        return [self._memory(tensor), tensor.numel() if each is None else each, datatype(self._mpi, tensor.dtype)]

    def _bytes(self, tensor: Tensor, each: int | None = None) -> list[Any]:
        """A buffer of bytes; `each` is what one rank has of it."""
        return [self._memory(tensor), tensor.nbytes if each is None else each, self._mpi.BYTE]

    def _memory(self, tensor: Tensor) -> Any:
        return memory_of(self._mpi, tensor)


def memory_of(mpi: Any, tensor: Tensor) -> Any:
    """Returns a tensor's memory as mpi4py takes it, to be read at once; the tensor must live until MPI is done."""
    if tensor.is_cuda:  # which a CUDA-aware MPI reads itself, and knows nothing of what is still being computed
        torch.cuda.current_stream(tensor.device).synchronize()
    if tensor.numel() == 0:
        return mpi.buffer.allocate(0)
    return mpi.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)
