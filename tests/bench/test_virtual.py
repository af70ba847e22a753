"""The benchmark of virtual ranks does the same work on both sides."""

from __future__ import annotations

import pytest
import torch
from small import small

import samestep
from samestep.bench import virtual
from samestep.bench.harness import Options
from samestep.bench.step import our_steps
from samestep.bench.workloads import MLP
from samestep.errors import UsageError
from samestep.testing import largest_difference


def trained(slices):
    with samestep.world(device="cpu", virtual_ranks=slices) as world:
        model = MLP.network()
        training = our_steps(MLP, model, world)
        for _ in range(3):
            next(training)
        return dict(model.state_dict())


def test_both_sides_take_the_same_steps(two_ranks):
    """1e-6: float32 sums of 128 samples in another order; a step moves a weight by some 1e-3."""
    assert largest_difference(two_ranks(small, trained, (4,))[0], two_ranks(small, trained, (None,))[0]) < 1e-6


def test_every_rank_returns_a_time_for_each_pair_and_the_conditions(two_ranks):
    for ours, theirs, conditions in two_ranks(small, virtual.compare, (2, "cpu", 2)):
        assert (len(ours), len(theirs)) == (2, 2)
        assert min(*ours, *theirs) > 0
        assert (conditions["ranks"], conditions["batch_size"]) == (2, 2 * MLP.batch)


def threads_of(slices):
    """The threads that each side's steps were taken on, one of a block's, and what is told of it."""
    torch.set_num_threads(3)  # as many as a rank is given that has cores to itself
    seen = []
    takes = virtual.advance

    def noted(steps):
        seen.append(torch.get_num_threads())
        takes(steps)

    virtual.advance = noted
    try:
        conditions = virtual.compare(2, "cpu", slices)[2]
    finally:
        virtual.advance = takes
    return seen[:2], conditions["threads_per_rank"]


def test_ranks_without_virtual_ones_keep_their_threads(two_ranks):
    assert two_ranks(small, threads_of, (1,)) == [([1, 3], 3)] * 2


def test_a_number_of_ranks_that_cannot_share_is_refused():
    with pytest.raises(UsageError, match="not to 3"):
        virtual.run(Options(ranks=3))
