"""The benchmark of the replica guard takes the same steps on both sides, and one check in every block of one."""

from __future__ import annotations

import pytest
from small import small

import samestep
from samestep.bench import guard
from samestep.bench.harness import Options
from samestep.errors import UsageError
from samestep.replicas.drift import DriftGuard, DriftMonitor


def counted():
    with samestep.world(device="cpu") as world:
        import torch

        model = samestep.replicate(torch.nn.Linear(2, 1), world)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        watch = DriftMonitor(model.module, world, DriftGuard(every=guard.EVERY))
        taken = []

        def steps():
            while True:
                model(torch.ones(3, 2)).sum().backward()
                optimizer.step()
                taken.append(watch.checks)
                yield

        training = steps()
        for awake in (True, False, False, True):
            guard.block(training, watch, awake=awake)
        blocks = [taken[begin : begin + guard.EVERY] for begin in range(0, 4 * guard.EVERY, guard.EVERY)]
        return [(one[0], one[-2], one[-1]) for one in blocks], len(guard.checks(watch, training, world)), watch.checks


def test_a_block_ends_with_a_check_or_has_none(two_ranks):
    checks = [(0, 0, 1), (1, 1, 1), (1, 1, 1), (1, 1, 2)]
    assert two_ranks(counted) == [(checks, guard.CHECKS, 2 + guard.CHECKS)] * 2


def test_every_rank_returns_a_time_for_each_pair_each_check_and_the_conditions(two_ranks):
    found = two_ranks(lambda: small(guard.compare, (2, "cpu"), EVERY=3, CHECKS=4))
    for ours, theirs, check_s, conditions in found:
        assert (len(ours), len(theirs), len(check_s)) == (2, 2, 4)
        assert min(*ours, *theirs, *check_s) > 0
        assert (conditions["ranks"], conditions["steps_per_block"]) == (2, 3)


def test_a_checks_share_is_that_of_the_steps_between_two():
    assert guard.figures([0.001, 0.002, 0.009], (0.01, 0.02, 0.5)) == pytest.approx(
        {"ms_per_check": 2.0, "percent_of_a_step": 100 * 0.002 / (16 * 0.02)}
    )


def test_one_rank_is_refused():
    with pytest.raises(UsageError, match="of which one rank has one: samestep bench guard -n 2"):
        guard.run(Options(ranks=1))
