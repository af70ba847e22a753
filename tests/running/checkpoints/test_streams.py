from __future__ import annotations

import random

import numpy as np
import torch

import samestep
from samestep.running.checkpoints import streams
from samestep.running.checkpoints.format import Encoder, decode


def draw():
    numbers = [random.gauss(0, 1), random.random(), np.random.normal(), np.random.rand()]
    return [*numbers, torch.rand(1).item(), torch.randn(1).item()]


def drawn_before_and_after(_):
    with samestep.world(device="cpu") as world:
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(100 + world.rank)
        draw()  # leaves half a pair of normal numbers behind in Python's and NumPy's streams
        encoder = Encoder()
        tree = encoder.encode(streams.gather(world), "random")
        went_on = draw()
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(0)
        streams.restore(decode(tree, encoder.tensors), world)
        return went_on, draw()


def test_every_stream_goes_on_where_it_stood():
    went_on, restored = drawn_before_and_after(None)
    assert restored == went_on


def test_each_rank_gets_its_own_streams_back(two_ranks):
    (first, first_again), (second, second_again) = two_ranks(drawn_before_and_after, None)
    assert (first_again, second_again) == (first, second)
    assert first != second
