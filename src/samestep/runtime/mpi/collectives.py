"""The collectives of one communicator, on tensors in host memory whose elements lie one after another.

Reductions are MPI's own, in pieces that the cache holds; what only moves is sent as bytes. Beyond PIECE broadcasts go
in pieces, one after another, and the others as messages between each two ranks, all at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from samestep.errors import UsageError
from samestep.runtime.mpi.operations import Waiting
from samestep.runtime.mpi.tensors import (
    NAMES,
    copy_back,
    divide,
    fits_one_message,
    memory_of,
    on_host,
    operation,
    pieces,
    to_host,
    widened,
)

REDUCED = 4 << 20  # bytes of a reduction: MPI's own buffer stays in the cache; 100 MiB take half the time


class Collectives:
    """The collectives of one communicator; all its ranks must make the same calls in the same order."""

    def __init__(self, mpi: Any, communicator: Any, waiting: Waiting) -> None:
        self._mpi = mpi
        self._communicator = communicator
        self.waiting = waiting
        self._rank: int = communicator.rank
        self._size: int = communicator.size

    def all_reduce(self, tensor: Tensor, op: str) -> None:
        self._reduce_in_place(tensor, op, "Allreduce")

    def reduce(self, tensor: Tensor, op: str, root: int) -> None:
        """Reduces in place on the root; elsewhere the tensor is left alone."""
        if self._rank == root:
            self._reduce_in_place(tensor, op, "Reduce", root)
            return
        wide = widened(tensor)
        for piece in pieces(wide, REDUCED):
            self._call("Reduce", self._numbers(piece), None, operation(self._mpi, op, wide.dtype), root)

    def _reduce_in_place(self, tensor: Tensor, op: str, name: str, *root: int) -> None:
        wide = widened(tensor)
        for piece in pieces(wide, REDUCED):
            self._call(name, self._mpi.IN_PLACE, self._numbers(piece), operation(self._mpi, op, wide.dtype), *root)
        if op == "avg":
            divide(wide, self._size)
        if wide is not tensor:
            tensor.copy_(wide)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        for piece in pieces(tensor):
            self._call("Bcast", self._bytes(piece), root)

    def all_gather(self, rows: Tensor, mine: Tensor) -> None:
        """Fills the rows of `rows` with the ranks' tensors, in rank order."""
        if mine.untyped_storage().data_ptr() == rows.untyped_storage().data_ptr():  # which MPI refuses; FSDP does it
            mine = mine.clone()
        if fits_one_message(mine):
            self._call("Allgather", self._bytes(mine), self._bytes(rows, mine.nbytes))
        else:
            self.exchange(dict.fromkeys(range(self._size), mine), self._by_rank(rows))

    def all_gather_each(self, rows: Sequence[Tensor], tensor: Tensor) -> None:
        """Fills each tensor of `rows` with that of a rank: in one call where they are equally long."""
        mine = to_host(tensor)
        if all(row.numel() == tensor.numel() and row.dtype == tensor.dtype for row in rows):
            together = torch.empty(len(rows) * mine.numel(), dtype=mine.dtype)
            self.all_gather(together, mine)
            for row, part in zip(rows, together.view(len(rows), -1), strict=True):
                copy_back(row, part)
            return
        with on_host(*rows) as values:
            self.exchange(dict.fromkeys(range(self._size), mine), dict(enumerate(values)))

    def gather(self, rows: Tensor | None, mine: Tensor, root: int) -> None:
        """Fills the rows of the root's `rows` with the ranks' tensors; None elsewhere."""
        if fits_one_message(mine):
            self._call("Gather", self._bytes(mine), None if rows is None else self._bytes(rows, mine.nbytes), root)
        else:
            self.exchange({root: mine}, {} if rows is None else self._by_rank(rows))

    def scatter(self, mine: Tensor, rows: Tensor | None, root: int) -> None:
        """Sends each rank its row of the root's `rows`; None elsewhere."""
        if fits_one_message(mine):
            self._call("Scatter", None if rows is None else self._bytes(rows, mine.nbytes), self._bytes(mine), root)
        else:
            self.exchange({} if rows is None else self._by_rank(rows), {root: mine})

    def _by_rank(self, rows: Tensor) -> dict[int, Tensor]:
        return dict(enumerate(rows.view(self._size, -1)))

    def reduce_scatter(self, mine: Tensor, parts: Sequence[Tensor], op: str) -> None:
        if all(part.numel() == mine.numel() for part in parts) and fits_one_message(mine):
            rows = widened(torch.cat([part.reshape(-1) for part in parts]))
            into = torch.empty(mine.numel(), dtype=rows.dtype)
            added = operation(self._mpi, op, rows.dtype)
            self._call("Reduce_scatter_block", self._numbers(rows, into.numel()), self._numbers(into), added)
            if op == "avg":
                divide(into, self._size)
            mine.copy_(into.view_as(mine))
            return
        for owner, part in enumerate(parts):
            total = part.clone()
            self.reduce(total, op, owner)
            if owner == self._rank:
                mine.copy_(total.view_as(mine))

    def barrier(self) -> None:
        self._call("Barrier")

    def exchange(self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]) -> None:
        """Sends a tensor to each of some ranks and receives one from each of others; a rank's own is copied."""
        if self._rank in sent:
            received[self._rank].view(-1).view(torch.uint8).copy_(sent[self._rank].reshape(-1).view(torch.uint8))
        requests = [
            post(self._bytes(piece), rank)
            for post, tensors in ((self._communicator.Irecv, received), (self._communicator.Isend, sent))
            for rank, tensor in tensors.items()
            for piece in pieces(tensor)
            if rank != self._rank
        ]
        if requests:
            self.waiting.until_done(requests)

    def _call(self, name: str, *arguments: Any) -> None:
        """Calls MPI, blocking or not: `Allreduce`, or `Iallreduce` and polling."""
        if self.waiting.blocking:
            getattr(self._communicator, name)(*arguments)
        else:
            request = getattr(self._communicator, f"I{name[0].lower()}{name[1:]}")(*arguments)
            self.waiting.until_done([request])

    def _numbers(self, tensor: Tensor, each: int | None = None) -> list[Any]:
        """A buffer of numbers; `each` is how many of them are one rank's."""
        count = tensor.numel() if each is None else each
        return [memory_of(self._mpi, tensor), count, getattr(self._mpi, NAMES[tensor.dtype])]

    def _bytes(self, tensor: Tensor, each: int | None = None) -> list[Any]:
        return [memory_of(self._mpi, tensor), tensor.nbytes if each is None else each, self._mpi.BYTE]


def equal_parts(tensor: Tensor, ranks: int) -> list[Tensor]:
    """Returns the ranks' parts of a tensor, which are of one length."""
    if tensor.numel() % ranks:
        raise UsageError(f"a tensor of {tensor.numel()} elements cannot be cut evenly among {ranks} ranks")
    return list(tensor.reshape(ranks, -1).unbind())


def split_rows(tensor: Tensor, splits: Sequence[int] | None, ranks: int) -> list[Tensor]:
    """Returns the ranks' parts of a tensor, cut along dim 0: evenly, or as `splits` says."""
    if splits:
        if len(splits) != ranks or sum(splits) != tensor.shape[0]:
            raise UsageError(f"parts of {list(splits)} rows for {ranks} ranks do not make up {tensor.shape[0]} rows")
        return list(torch.split(tensor, list(splits)))
    if tensor.shape[0] % ranks:
        raise UsageError(f"a tensor of {tensor.shape[0]} rows cannot be cut evenly among {ranks} ranks")
    return list(tensor.chunk(ranks)) if tensor.numel() else [tensor] * ranks
