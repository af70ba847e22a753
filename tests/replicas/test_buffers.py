"""Buffers made equal on all ranks."""

from __future__ import annotations

import torch
from torch import nn

import samestep
from samestep.replicas.buffers import sync_buffers
from samestep.testing import assert_same_bits


class ManyBuffers(nn.Module):
    def __init__(self, rank):
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), float(rank)))
        generator = torch.Generator().manual_seed(rank)
        self.register_buffer("mean", torch.randn(3, generator=generator))
        self.register_buffer("exact", torch.randn(2, 3, generator=generator, dtype=torch.float64).t())
        self.register_buffer("narrow", torch.randn(5, generator=generator).bfloat16())
        self.register_buffer("count", torch.tensor(2**60 + rank))
        self.register_buffer("mask", torch.tensor([rank == 0, True, False]))
        self.register_buffer("phase", torch.randn(2, generator=generator, dtype=torch.complex64), persistent=False)
        self.register_buffer("nothing", torch.zeros(0, 4))
        self.register_buffer("unset", None)


def equalised():
    with samestep.world() as world:
        module = ManyBuffers(world.rank)
        before = list(module.buffers())
        sync_buffers(module, world.data)
        assert all(a is b for a, b in zip(before, module.buffers(), strict=True))
        return dict(module.named_buffers()), float(module.weight[0].detach())


def test_every_rank_gets_the_first_ranks_buffers_of_every_type(three_ranks):
    expected = dict(ManyBuffers(0).named_buffers())
    for rank, (buffers, parameter) in enumerate(three_ranks(equalised)):
        assert_same_bits(buffers, expected)
        assert parameter == rank  # parameters are not its business


def test_alone_and_without_buffers_nothing_happens():
    assert_same_bits(equalised()[0], dict(ManyBuffers(0).named_buffers()))
    with samestep.world() as world:
        sync_buffers(nn.Linear(1, 1), world.data)
