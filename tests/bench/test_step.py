"""The step benchmark does the same work on both sides."""

from __future__ import annotations

import torch

import samestep
from samestep.bench import step


def distance_trained(make, steps):
    with samestep.world() as world:
        network = step.network()
        before = [parameter.detach().clone() for parameter in network.parameters()]
        training = make(network, world)
        for _ in range(steps):
            next(training)
        gone = [(a.detach() - b).square().sum() for a, b in zip(network.parameters(), before, strict=True)]
        return float(sum(gone)) ** 0.5


def test_both_sides_train_as_far_in_as_many_steps(two_ranks):
    (ours, also_ours), (theirs, also_theirs) = (
        two_ranks(distance_trained, make, 8) for make in (step.our_steps, step.their_steps)
    )
    assert (ours, theirs) == (also_ours, also_theirs)
    assert ours > 0
    # They see different samples of the same distribution; a loss scaled wrongly by the ranks would be off by 2.
    assert abs(ours / theirs - 1) < 0.1


def test_every_rank_returns_a_time_for_each_pair_and_the_setting(two_ranks):
    for ours, theirs, setting in two_ranks(step.compare, 3, "cpu", True):
        assert (len(ours), len(theirs)) == (3, 3)
        assert min(*ours, *theirs) > 0
        assert (setting["ranks"], setting["backend"], setting["batch_size"]) == (2, "gloo", 2 * step.BATCH_PER_RANK)
        assert setting["torch"] == torch.__version__


def test_the_network_has_about_five_million_parameters():
    assert abs(sum(parameter.numel() for parameter in step.network().parameters()) - 5e6) < 5e4
