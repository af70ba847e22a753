"""Ranks of one replica that are about to do different things say so, instead of waiting for each other."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import samestep
from samestep.errors import DataError
from samestep.pipelines.batch_check import sample_bytes
from samestep.pipelines.pipeline import Pipeline
from samestep.testing import assert_same_bits


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4))


def batch(samples=8, shift=0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, 6, generator=generator), (torch.arange(samples) + shift) % 4


SAMPLES = (
    "rank 0 takes a step of 8 samples in 4 micro-batches .float32 .8, 6., int64 .8.., rank 1 a step of 3 samples in 3"
)
UNLIKE = {
    "fewer samples": (lambda stage, rank: stage.step(batch(3 if rank else 8)), SAMPLES),
    "more samples": (
        lambda stage, rank: stage.step(batch(8 if rank else 3)),
        "rank 0 takes a step of 3 samples .*, rank 1 a step of 8 samples",
    ),
    "other shapes": (
        lambda stage, rank: stage.step((torch.ones(8, 6 + rank), batch()[1])),
        r"float32 \[8, 6\].*float32 \[8, 7\]",
    ),
    "other targets": (lambda stage, rank: stage.step(batch(shift=rank)), "ranks 0, 1 have targets of other values"),
    "a step and an evaluation": (
        lambda stage, rank: stage(batch()[0]) if rank else stage.step(batch()),
        "rank 0 takes a step of 8 samples .*, rank 1 outputs of 8 samples",
    ),
    "a dictionary": (
        lambda stage, _: stage.step(({"x": batch()[0]}, batch()[1])),
        "input 0 of the batch is a dict: the",
    ),
    "nothing": (lambda stage, _: stage.step((1, 2)), "the batch has no tensor: inputs and targets are tensors"),
}


def told(mailbox):
    """By what is unlike: what each rank is told of a second step, and the losses of the steps before and after it."""
    found = {}
    with samestep.world(pipeline=2, timeout=60) as world:
        if not mailbox:
            world.pipeline.scalars = None  # as between hosts
        for name, (call, _) in UNLIKE.items():
            stage = Pipeline(model(), world, F.cross_entropy, ends=[2, 5])
            before = stage.step(batch())
            with pytest.raises(DataError) as said:
                call(stage, world.rank)
            found[name] = str(said.value), before, stage.step(batch())
    return found


@pytest.mark.parametrize("mailbox", [True, False])
def test_ranks_with_different_batches_are_told_so_on_all_of_them_and_can_go_on(two_ranks, mailbox):
    first, second = two_ranks(told, mailbox)
    for name, (_, said) in UNLIKE.items():
        assert first[name][0] == second[name][0]
        assert re.search(said, first[name][0]), first[name][0]
        for _, before, after in (first[name], second[name]):
            assert_same_bits(before, after)


def crossed():
    """Two pipelines, which the ranks call in another order."""
    with samestep.world(pipeline=2) as world:
        stages = [Pipeline(model(), world, F.cross_entropy, ends=[2, 5]) for _ in range(2)]
        for stage in stages[:: -1 if world.rank else 1]:
            stage.step(batch())


def test_pipelines_that_are_called_in_another_order_are_named(two_ranks):
    with pytest.raises(
        samestep.RankFailure, match=r"batch 1 of pipeline \d+.*call the same pipelines in the same order"
    ):
        two_ranks(crossed)


def thawed(stages, ends, schedule):
    """Steps with stages that want no gradients, and then do, and others that do not."""
    with samestep.world(pipeline=stages) as world:
        stage = Pipeline(model(), world, F.cross_entropy, ends=ends, schedule=schedule)
        optimizer = torch.optim.SGD(stage.parameters(), lr=0.1, momentum=0.9)
        found = {}
        for number, frozen in enumerate(("0", "", "4", "024", "0", "02", "")):
            for name, each in stage.named_parameters():
                each.requires_grad_(name[0] not in frozen)
            if frozen != "024":
                found[f"loss {number}"] = stage.step(batch(seed=number))
                optimizer.step()
                optimizer.zero_grad()
            found[f"outputs {number}"] = stage(batch()[0])
        return found | stage.whole_state_dict()


@pytest.mark.parametrize(
    ("ends", "schedule"),
    [
        pytest.param((1, 5), "1f1b", marks=pytest.mark.prove),
        ((3, 5), "zero-bubble"),
        ((1, 2, 4, 5), "interleaved"),
    ],
)
def test_stages_can_be_frozen_and_thawed_between_steps(two_ranks, ends, schedule):
    alone = thawed(1, (5,), "1f1b")
    for found in two_ranks(thawed, 2, ends, schedule):
        assert_same_bits(found, alone)


def test_a_glimpse_of_a_large_tensor_is_small_and_spread_over_it():
    large = torch.zeros(100_000)
    before = list(sample_bytes({"y": [large]}))
    large[-100:] += 0  # the same
    assert list(sample_bytes({"y": [large]})) == before
    assert len(before[0]) <= 4 * 64
    large[0] = 1
    assert list(sample_bytes({"y": [large]})) != before
    assert not list(sample_bytes(torch.zeros(4, device="meta")))
