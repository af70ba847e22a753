"""The ranks' parts of tensors, on their way into MPI and out of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from samestep.errors import UsageError
from samestep.runtime.mpi import staging
from samestep.runtime.mpi.calls import Calls

__all__: list[str] = []


def in_place(act: Callable[[Tensor], None], tensors: Sequence[Tensor]) -> None:
    """Acts on the tensors' values where MPI can reach them, in place."""
    for tensor in tensors:
        values = staging.staged(tensor)
        act(values)
        staging.put_back(tensor, values)


def even(tensor: Tensor, ranks: int) -> list[Tensor]:
    """Returns the ranks' parts of a tensor, which are of one length."""
    if tensor.numel() % ranks:
        raise UsageError(f"a tensor of {tensor.numel()} elements cannot be cut evenly among {ranks} ranks")
    return list(tensor.reshape(ranks, -1).unbind())


def cut(tensor: Tensor, splits: Sequence[int] | None, ranks: int) -> list[Tensor]:
    """Returns the ranks' parts of a tensor, cut along dim 0."""
    if splits:
        if len(splits) != ranks or sum(splits) != tensor.shape[0]:
            raise UsageError(f"parts of {list(splits)} rows for {ranks} ranks do not make up {tensor.shape[0]} rows")
        return list(torch.split(tensor, list(splits)))
    if tensor.shape[0] % ranks:
        raise UsageError(f"a tensor of {tensor.shape[0]} rows cannot be cut evenly among {ranks} ranks")
    return list(tensor.chunk(ranks)) if tensor.numel() else [tensor] * ranks


def gather_all(calls: Calls, rows: Sequence[Tensor], mine: Tensor, rank: int) -> None:
    """Gathers tensors that are alike in one call, and others each to each."""
    values = staging.staged(mine)
    if all(row.numel() == mine.numel() and row.dtype == mine.dtype for row in rows):
        every = torch.empty(len(rows) * values.numel(), dtype=values.dtype)
        calls.all_gather(every, values)
        for row, part in zip(rows, every.view(len(rows), -1), strict=True):
            staging.put_back(row, part)
        return
    into = [staging.staged(row) for row in rows]
    others = [other for other in range(len(rows)) if other != rank]
    calls.exchange(dict.fromkeys(others, values), {other: into[other] for other in others})
    rows[rank].detach().copy_(mine.detach())
    for other in others:
        staging.put_back(rows[other], into[other])
