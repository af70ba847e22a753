"""The loss of a step over all ranks, and the factor that makes up for DistributedDataParallel's division.

A script that prints its loss usually prints that of rank 0's last micro-batch, or stops all ranks to reduce it. Here
every rank adds up its share while the step computes and hands it over when the step ends; nobody waits until asked.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
import torch.distributed as dist

from samestep.runtime.world import World

__all__: list[str] = []


class StepLoss:
    """The step's loss: summed here while it computes, over the ranks when it ends, read when somebody asks."""

    def __init__(self, world: World) -> None:
        self._axis = world.data
        self._on_host = world.device.type == "cpu"
        self._device = world.device
        self._sum: torch.Tensor | None = None
        self._reduced: torch.Tensor | None = None
        self._work: dist.Work | None = None

    def add(self, value: torch.Tensor) -> None:
        """Adds one micro-batch's share, a scalar."""
        part = value.detach().to(torch.float64, copy=True)  # reduced in place; the caller's value must not change
        self._sum = part if self._sum is None else self._sum + part

    def discard(self) -> None:
        """Forgets a step that was abandoned."""
        self._sum = None

    def reduce(self) -> None:
        """Every rank calls it at the end of every step, so that a rank which never called `mean` holds nobody up."""
        nothing = torch.zeros((), dtype=torch.float64, device=self._device)
        used = self._sum is not None
        total, self._sum = (nothing if self._sum is None else self._sum), None
        group = self._axis.control if self._on_host else self._axis.group
        self._work = None if group is None else dist.all_reduce(total, group=group, async_op=True)
        self._reduced = total if used else None

    def read(self) -> float:
        """Returns the last reduced loss; waits if it is still on its way."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return math.nan if self._reduced is None else float(self._reduced)


class _ScaleGradient(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a number."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, factor: int) -> torch.Tensor:
        ctx.factor = factor
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] * ctx.factor, None


def scale_gradient(value: torch.Tensor, factor: int) -> torch.Tensor:
    """Returns `value`, whose gradient will be multiplied by `factor`."""
    scaled = _ScaleGradient.apply(value, factor)  # type: ignore[no-untyped-call]
    return cast("torch.Tensor", scaled)
