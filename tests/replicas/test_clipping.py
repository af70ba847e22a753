"""Clipping on N ranks as in one process."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import samestep
from samestep.errors import RankFailure, StepError, UsageError
from samestep.testing import assert_same_bits, largest_difference


def train_clipped(max_norm, norm_type=2.0, micro_batch_size=None, steps=20):
    with samestep.world() as world:
        torch.manual_seed(1)
        x, y = torch.randn(37, 4, dtype=torch.float64) * 5, torch.randn(37, 1, dtype=torch.float64)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        replica = samestep.replicate(model, world)
        optimizer = torch.optim.SGD(replica.parameters(), lr=0.05, momentum=0.9)
        data = torch.utils.data.TensorDataset(x, y)
        batches = samestep.shards(data, world, batch_size=8, micro_batch_size=micro_batch_size)
        norms = []
        while len(norms) < steps:
            for part, target in batches:
                batches.mean((replica(part) - target).square().squeeze(1)).backward()
                if batches.step_ends:
                    norms.append(samestep.clip_grad_norm_(replica, max_norm, norm_type))
                    optimizer.step()
                    optimizer.zero_grad()
        return norms, {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
def test_three_ranks_clip_as_one_process_does(three_ranks, norm_type):
    norms, parameters = train_clipped(0.5, norm_type)
    assert max(norms) > 0.5  # it did clip
    results = three_ranks(train_clipped, 0.5, norm_type)
    assert_same_bits(results[1:], results[:1] * 2)
    assert largest_difference(list(results[0]), [norms, parameters]) < 1e-12


def test_two_ranks_clip_accumulated_gradients_as_one_process_does(two_ranks):
    expected = train_clipped(0.5)
    for result in two_ranks(train_clipped, 0.5, 2.0, 2):
        assert largest_difference(list(result), list(expected)) < 1e-12


def clip_every_micro_batch(holder):
    with samestep.world() as world:
        replica = samestep.replicate(nn.Linear(4, 1), world)
        model = nn.ModuleList([replica]) if holder else replica
        data = torch.utils.data.TensorDataset(torch.randn(8, 4))
        batches = samestep.shards(data, world, batch_size=8, micro_batch_size=2)
        for (part,) in batches:
            batches.mean(replica(part).squeeze(1)).backward()
            samestep.clip_grad_norm_(model, 1.0)


@pytest.mark.parametrize("holder", [False, True], ids=["replica", "module that holds one"])
def test_clipping_before_the_step_ends_is_refused(two_ranks, holder):
    with pytest.raises(RankFailure, match=r"StepError: clip_grad_norm_ was called after a micro-batch"):
        two_ranks(clip_every_micro_batch, holder)


def test_it_is_refused_alone_as_well():
    with pytest.raises(StepError, match=r"if batches\.step_ends"):
        clip_every_micro_batch(holder=False)


def make_gradients():
    layer = nn.Linear(3, 2)
    layer.weight.grad = torch.tensor([[3.0, 0.0, 0.0], [0.0, 4.0, 0.0]])
    return layer


def test_a_module_its_parameters_an_iterator_and_one_tensor_are_clipped_alike():
    for given in (lambda m: m, lambda m: list(m.parameters()), lambda m: m.parameters(), lambda m: m.weight):
        layer = make_gradients()
        assert float(samestep.clip_grad_norm_(given(layer), 1.0)) == 5.0
        assert float(layer.weight.grad.norm()) == pytest.approx(1.0, abs=1e-6)
        assert layer.bias.grad is None


def test_a_norm_below_the_limit_changes_no_bit():
    layer = make_gradients()
    samestep.clip_grad_norm_(layer, 5.1)
    assert torch.equal(layer.weight.grad, make_gradients().weight.grad)


def test_without_gradients_the_norm_is_zero():
    assert float(samestep.clip_grad_norm_(nn.Linear(1, 1), 1.0)) == 0.0


def test_a_norm_that_is_not_finite_raises_only_when_asked():
    layer = make_gradients()
    layer.weight.grad[0, 0] = math.nan
    assert math.isnan(samestep.clip_grad_norm_(layer, 1.0))
    with pytest.raises(RuntimeError, match="non-finite"):
        samestep.clip_grad_norm_(layer, 1.0, error_if_nonfinite=True)


@pytest.mark.parametrize("limit", [-1.0, math.nan])
def test_a_negative_limit_is_refused(limit):
    with pytest.raises(UsageError, match="max_norm must be 0 or more"):
        samestep.clip_grad_norm_(make_gradients(), limit)
