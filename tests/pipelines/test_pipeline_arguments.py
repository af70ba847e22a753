"""Arguments of `samestep.pipeline` and `samestep.plan_pipeline`, in one process."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import samestep

PADDED = torch.tensor([0, 1, 2, 0, 1, -1, -1, -1])  # 5 items, 4 of them in the first of two micro-batches


def loss(outputs, targets):
    return F.cross_entropy(outputs, targets, ignore_index=-1)


def test_micro_batches_count_as_weight_says():
    torch.manual_seed(0)
    x, one, other = torch.randn(8, 4, dtype=torch.float64), nn.Linear(4, 4).double(), nn.Linear(4, 3).double()
    expected = loss(other(one(x)), PADDED)
    (wanted,) = torch.autograd.grad(expected, one.weight)
    with samestep.world(device="cpu") as world:
        stage = samestep.pipeline(
            [one, other], world, loss_fn=loss, micro_batches=2, weight=lambda targets: (targets >= 0).sum()
        )
        told = stage.step((x, PADDED))
    for found, alone in ((told, expected), (one.weight.grad, wanted)):
        torch.testing.assert_close(found.detach(), alone.detach(), rtol=1e-12, atol=1e-14)


class Counts(nn.Linear):
    passes = 0

    def forward(self, x):
        Counts.passes += 1
        return super().forward(x)


def passes(repeats):
    before = Counts.passes
    model, batch = nn.Sequential(Counts(4, 4), nn.ReLU()), (torch.ones(8, 4), torch.ones(8, 4))
    samestep.plan_pipeline(model, batch, F.mse_loss, stages=1, micro_batches=1, repeats=repeats)
    return Counts.passes - before


def test_layers_are_timed_as_often_as_repeats_says():
    one, three, five = passes(1), passes(3), passes(5)
    assert 0 < three - one == five - three
