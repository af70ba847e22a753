"""All ranks of a plan in one process, executed in the simplest way: what the engine's results are compared with."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from samestep.collectives.plan import Plan, execute
from samestep.errors import UsageError


def run(plan: Plan, buffers: Sequence[Tensor]) -> None:
    """Executes a plan on every rank's buffer, in place.

    Args:
        plan: over `len(buffers)` ranks.
        buffers: one a rank, each of shape (elements,).

    Raises:
        UsageError: not one buffer a rank, or they differ in dtype or shape.

    Example:
        >>> import torch
        >>> from samestep.collectives import ring
        >>> buffers = [torch.tensor([1, 2, 3]), torch.tensor([10, 20, 30])]
        >>> run(ring.all_reduce(2), buffers)
        >>> buffers
        [tensor([11, 22, 33]), tensor([11, 22, 33])]
    """
    if len(buffers) != plan.ranks:
        raise UsageError(f"{plan.name} is a plan over {plan.ranks} ranks, and here are {len(buffers)} buffers")
    if len({(buffer.dtype, tuple(buffer.shape)) for buffer in buffers}) > 1:
        raise UsageError(f"{plan.name}: the buffers differ in dtype or shape: make them alike on every rank")
    edges = plan.edges(buffers[0].numel())
    blocks = [[buffer[edges[at] : edges[at + 1]].clone() for at in range(plan.blocks)] for buffer in buffers]
    for buffer, row in zip(buffers, execute(plan, blocks), strict=True):
        for at, block in enumerate(row):
            buffer[edges[at] : edges[at + 1]] = block
