"""The learning rate as a function of the global step.

torch's CosineAnnealingLR keeps its length in its state, so a run resumed for more epochs climbs up the cosine again;
and a scheduler stepped in every micro-batch, or on every rank by another count, is ahead of the optimizer. These
take one step for each optimizer step, and know the length from the options alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.optim.lr_scheduler import LambdaLR

__all__ = ["cosine", "cosine_factor"]

LAST = 0.1  # of the highest rate


def cosine(optimizer: torch.optim.Optimizer, steps: int, *, warm_up: int = 0) -> LambdaLR:
    """Call its `step()` after each `optimizer.step()`, and nowhere else."""
    return LambdaLR(optimizer, cosine_factor(steps, warm_up))


def cosine_factor(steps: int, warm_up: int) -> Callable[[int], float]:
    """The share of the highest rate at global step k: up in a line to 1, then down half a cosine to a tenth.

    >>> factor = cosine_factor(110, warm_up=10)
    >>> [round(factor(step), 3) for step in (0, 9, 10, 60, 110)]
    [0.1, 1.0, 1.0, 0.55, 0.1]
    """

    def factor(step: int) -> float:
        if step < warm_up:
            return (step + 1) / warm_up
        done = min(1.0, (step - warm_up) / max(1, steps - warm_up))
        return LAST + (1 - LAST) * (1 + math.cos(math.pi * done)) / 2

    return factor
