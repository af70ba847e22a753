"""A backward in two halves has the bits of a whole one, and does no product twice."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry

from samestep.pipelines.split_backward import SplitBackward
from samestep.testing import assert_same_bits


class Block(nn.Module):
    """Attention and a feed-forward part, as in a transformer: many operations, skips, views."""

    def __init__(self, width=8):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v))
        return x + self.feed(x)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)

    def forward(self, x):
        return self.one(torch.tanh(self.one(torch.tanh(self.one(x))))) + self.other(x)


class Beside(nn.Module):
    """Weights that no input comes near: a table of positions, a scale made of two, one that is never used."""

    def __init__(self):
        super().__init__()
        self.table, self.scale = nn.Parameter(torch.randn(5, 8)), nn.Parameter(torch.randn(8))
        self.shift, self.unused, self.alone = nn.Linear(8, 8), nn.Linear(8, 8), nn.Parameter(torch.randn(8))

    def forward(self, x):
        return torch.stack([x * self.scale.exp() + self.shift(self.table), self.alone.expand_as(x)])


class Remade(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Block()

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


MODELS = {
    "chain": lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3)),
    "transformer": lambda: nn.Sequential(Block(), Block()),
    "convolutions": lambda: nn.Sequential(nn.Unflatten(2, (1, 8)), nn.Flatten(0, 1), nn.Conv1d(1, 4, 3), nn.ReLU()),
    "tied": Tied,
    "beside": Beside,
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
    "remade": Remade,
    "frozen": lambda: nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.Tanh(), nn.Linear(8, 8)),
    "no weights": nn.Tanh,
}


class Products(TorchDispatchMode):
    """Counts what matrix products and convolutions cost. FlopCounterMode's own hooks do not bear autograd.grad."""

    flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in flop_registry:
            self.flops += flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=out)
        return out


def products(model, split):
    """What the products of two forwards and backwards cost."""
    with Products() as counted:
        gradients(model, split)
    return counted.flops


def gradients(model, split, wants=True):
    """Of two micro-batches, whose second halves come after both first ones."""
    generator = torch.Generator().manual_seed(1)
    weights = [each for each in model.parameters() if each.requires_grad]
    for each in weights:
        each.grad = None
    found, later = [], []
    inputs = [torch.randn(2, 5, 8, generator=generator).requires_grad_(wants) for _ in range(2)]
    losses = [model(x).square().mean() for x in inputs]
    for x, loss in zip(inputs, losses, strict=True):
        if not loss.requires_grad:
            continue
        if split:
            halves = SplitBackward([loss], [None], [x] if wants else [], weights)
            found += halves.backward_input()
            later.append(halves)
        else:
            loss.backward()
            found += [x.grad] if wants else []
    for halves in later:
        halves.backward_weight()
    return found, [each.grad for each in weights]


@pytest.mark.parametrize("wants", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_two_halves_have_the_bits_of_a_whole_backward(name, wants):
    torch.manual_seed(0)
    model = MODELS[name]()
    whole = gradients(model, split=False, wants=wants)
    assert_same_bits(gradients(model, split=True, wants=wants), whole)


@pytest.mark.parametrize("name", ["chain", "transformer", "convolutions", "weight norm", "frozen"])
def test_no_product_is_done_twice(name):
    torch.manual_seed(0)
    model = MODELS[name]()
    assert products(model, split=True) == products(model, split=False) > 0


def test_the_first_half_leaves_weights_alone():
    model = MODELS["transformer"]()
    x = torch.randn(2, 5, 8, requires_grad=True)
    (gradient,) = SplitBackward([model(x).sum()], [None], [x], list(model.parameters())).backward_input()
    assert gradient is not None
    assert all(each.grad is None for each in model.parameters())


def test_an_input_that_nothing_depends_on_has_no_gradient():
    model, x, unused = nn.Linear(8, 8), torch.ones(1, 8, requires_grad=True), torch.ones(1, requires_grad=True)
    halves = SplitBackward([model(x).sum()], [None], [x, unused], list(model.parameters()))
    first, second = halves.backward_input()
    halves.backward_weight()
    assert first is not None
    assert second is None
    assert model.weight.grad is not None


def test_a_graph_may_be_deep():
    model, x = nn.Linear(2, 2), torch.ones(1, 2, requires_grad=True)
    out = model(x)
    for _ in range(20_000):
        out = out + 1
    halves = SplitBackward([out.sum()], [None], [x], list(model.parameters()))
    halves.backward_input()
    halves.backward_weight()
    assert torch.equal(model.bias.grad, torch.ones(2))
