"""What is measured of layers is what they take, and nothing of the model is changed by it."""

from __future__ import annotations

import itertools
import time

import pytest
import torch
from known_layers import Clock, Takes, layers_of
from torch import nn

from samestep.errors import UsageError
from samestep.pipelines.profiler import profile_layers
from samestep.testing import assert_same_bits

KNOWN = [(4.0, 3.0, 2.0), (10.0, 6.0, 12.0), (2.0, 8.0, 0.0), (6.0, 1.0, 3.0)]


def test_layers_of_known_cost_are_measured(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", lambda: clock.seconds)
    layers = layers_of(*(Takes(clock, number + 1, *seconds) for number, seconds in enumerate(KNOWN)))
    found = profile_layers(layers, [torch.ones(3, 5)], torch.sum, 5)
    assert [(layer.forward, layer.inputs, layer.weights) for layer in found] == [(4.0, 0.0, 2.0), *KNOWN[1:]]
    assert [layer.split for layer in found] == [0.0] * 4


def test_a_model_may_begin_with_an_embedding():
    """Nothing before its values has a gradient, also while parameters want none."""
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    found = profile_layers(layers_of(*model), [torch.arange(10)], torch.sum, 3)
    assert found[0].inputs == 0.0 < found[0].weights
    assert all(layer.inputs > 0 for layer in found[1:])


def test_the_loss_is_the_last_layers(monkeypatch):
    """Of a large vocabulary it takes longer than any layer."""
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", lambda: clock.seconds)
    loss = Takes(clock, 9, 30.0, 50.0, 0.0)
    layers = layers_of(*(Takes(clock, number + 1, 1.0, 2.0, 3.0) for number in range(2)))
    first, last = profile_layers(layers, [torch.ones(3, 5)], lambda outputs: loss(outputs).sum(), 3)
    assert (first.forward, first.inputs, first.weights) == (1.0, 0.0, 3.0)
    assert (last.forward, last.inputs, last.weights) == (31.0, 52.0, 3.0)


class _Whole(torch.autograd.Function):
    """A backward that does both halves whichever is asked for."""

    @staticmethod
    def forward(ctx, x, weight, clock):
        ctx.clock = clock
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        ctx.clock.seconds += 5.0
        return gradient, gradient.sum().reshape(1), None


class Whole(Takes):
    def forward(self, x):
        return _Whole.apply(x, self.weight, self.clock)


def test_what_halves_of_a_backward_take_more_is_measured(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", lambda: clock.seconds)
    layers = layers_of(Whole(clock, 1), Whole(clock, 1), Takes(clock, 1, 1.0, 2.0, 3.0))
    assert [layer.split for layer in profile_layers(layers, [torch.ones(3, 5)], torch.sum, 5)] == [0.0, 5.0, 0.0]


class Unsteady(Takes):
    """Takes longer now and then."""

    def __init__(self, clock, weight, more):
        super().__init__(clock, weight, 10.0, 2.0, 3.0)
        self.more = more

    def forward(self, x):
        self.clock.seconds += next(self.more)
        return super().forward(x)


def test_how_far_passes_lie_apart_is_told(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", lambda: clock.seconds)
    more = itertools.chain([50, 50, 50], [0, 1, 2, 3, 40], itertools.repeat(0))  # three passes are thrown away
    layers = layers_of(Takes(clock, 1, 1.0, 2.0, 3.0), Unsteady(clock, 2, more))
    steady, unsteady = profile_layers(layers, [torch.ones(3, 5)], torch.sum, 5)
    assert (steady.spread, unsteady.spread) == (0.0, 1.0)
    assert (unsteady.forward, unsteady.inputs) == (12.0, 2.0)


def test_layers_that_are_alike_share_the_median_of_all(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", lambda: clock.seconds)
    layers = layers_of(*(Takes(clock, 1, *seconds) for number, seconds in enumerate(KNOWN)))
    first, *others = profile_layers(layers, [torch.ones(3, 5)], torch.sum, 3)
    assert (first.forward, first.inputs) == (4.0, 0.0)  # another: nobody wants its inputs' gradients
    assert {(layer.forward, layer.inputs, layer.weights) for layer in others} == {
        (6.0, 6.0, 2.0)
    }  # of 18, 8 and 4 whole


def test_bytes_are_counted():
    model = nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 3, bias=False))
    found = profile_layers(layers_of(*model), [torch.ones(4, 10)], torch.sum, 1)
    assert [layer.activations for layer in found] == [4 * 80, 4 * 80, 4 * 12]
    assert [layer.parameters for layer in found] == [(200 + 20) * 4, 0, 60 * 4]
    assert [layer.saved for layer in found] == [4 * 40, 4 * 80, 4 * 80]  # an input, an output, an input


def test_nothing_of_the_model_is_changed():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.InstanceNorm1d(4, track_running_stats=True))
    model[0].weight.grad = torch.ones(4, 4)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    state = torch.get_rng_state()
    profile_layers(layers_of(*model), [torch.randn(2, 4, 4, generator=torch.Generator())], torch.sum, 1)
    assert_same_bits(dict(model.state_dict()), before)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(model[0].weight.grad, torch.ones(4, 4))
    assert model[0].bias.grad is None
    assert all(each.requires_grad for each in model.parameters())


def test_no_passes_are_refused():
    with pytest.raises(UsageError, match="the median of 0 passes is to be taken"):
        profile_layers(layers_of(nn.Linear(1, 1)), [torch.ones(1, 1)], torch.sum, 0)
