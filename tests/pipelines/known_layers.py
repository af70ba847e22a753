"""Layers of known cost, on a clock that nothing else moves."""

from __future__ import annotations

import torch
from torch import nn


class Clock:
    """Time that only layers of known cost let pass."""

    def __init__(self):
        self.seconds = 0.0


class _Takes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, clock, forward, inputs, weights):
        clock.seconds += forward
        ctx.clock, ctx.seconds = clock, (inputs, weights)
        return x + 0 * weight.sum()

    @staticmethod
    def backward(ctx, gradient):
        for wanted, seconds in zip(ctx.needs_input_grad, ctx.seconds, strict=False):
            ctx.clock.seconds += seconds * wanted
        return gradient, None, None, None, None, None


class Takes(nn.Module):
    """A layer of known cost; `kind` is the size of its weight, by which layers are told apart."""

    def __init__(self, clock, kind, *seconds):
        super().__init__()
        self.clock, self.seconds = clock, seconds
        self.weight = nn.Parameter(torch.ones(kind))

    def forward(self, x):
        return _Takes.apply(x, self.weight, self.clock, *self.seconds)
