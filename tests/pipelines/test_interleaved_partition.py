"""Cuts for ranks with several stages: the best of all, as far as that is claimed, and no claim that is not so."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from chains import chain, every_cut

from samestep.errors import UsageError
from samestep.pipelines.layers import Device, Layer, Link
from samestep.pipelines.partition import PartitionProblem
from samestep.schedule.algorithms import ONE_STAGE_PER_RANK, forward_only, interleaved, make_schedule


def drawn(chance):
    """A problem of any kind: devices unlike, memory short, links slow, layers tied, few micro-batches."""
    ranks, chunks = chance.randint(1, 3), chance.randint(2, 3)
    count = chance.randint(ranks * chunks, 10)
    devices = [Device(chance.choice([1, 1, 0.5, 2]), chance.choice([math.inf, 40])) for _ in range(ranks)]
    link = Link(0.2 * chance.random(), chance.choice([math.inf, 2, 10]), chance.random() < 0.7, chance.choice([0, 0.3]))
    tied = [frozenset(chance.sample(range(count), 2))] if chance.random() < 0.2 else []
    plan = interleaved(ranks, chance.randint(1, 9), stages_per_rank=chunks)
    return PartitionProblem(chain(chance, count), devices, plan, link, colocated=tied)


def test_no_cut_of_all_is_better_on_any_of_many_random_chains():
    chance = random.Random(0)
    impossible = 0
    for _ in range(30):
        problem = drawn(chance)
        every = {ends: problem.seconds(ends) for ends in every_cut(len(problem.layers), problem.schedule.stages)}
        least = min(every.values())
        if least == math.inf:
            impossible += 1
            with pytest.raises(UsageError):
                problem.best()
            continue
        best = problem.best()
        assert best.seconds == every[best.ends] == pytest.approx(least)
        assert best.bound == pytest.approx(best.seconds)
    assert 1 < impossible < 16


def at_least(problem, ends):
    bound = problem._interleaved
    return bound._sums(ends)[: bound.num_times].max()


def test_no_step_is_shorter_than_its_bound():
    chance = random.Random(1)
    for _ in range(20):
        problem = drawn(chance)
        for ends in every_cut(len(problem.layers), problem.schedule.stages):
            assert at_least(problem, ends) <= problem.seconds(ends) * (1 + 1e-12)


def test_the_bound_of_stages_that_are_alike_is_what_they_take():
    layers = [Layer(str(number), 1, 1, 1) for number in range(12)]
    for ranks, chunks in ((2, 2), (2, 3), (3, 2), (3, 4)):
        problem = PartitionProblem(layers, [Device()] * ranks, interleaved(ranks, 8, stages_per_rank=chunks))
        ends = range(12 // (ranks * chunks), 13, 12 // (ranks * chunks))
        work = 36 / ranks  # seconds of a rank for a micro-batch
        assert problem.seconds(ends) == pytest.approx(8 * work + (ranks - 1) * work / chunks)
        assert at_least(problem, tuple(ends)) == pytest.approx(problem.seconds(ends))


def test_what_is_not_proved_is_told_as_a_gap():
    chance = random.Random(8)
    problem = PartitionProblem(chain(chance, 30), [Device()] * 3, interleaved(3, 6, stages_per_rank=3))
    whole, cut = problem.best(), problem.best(max_simulated=5)
    assert whole.bound <= whole.seconds <= cut.seconds
    assert cut.bound < cut.seconds
    assert cut.simulated <= 5
    for _ in range(300):
        ends = (*sorted(chance.sample(range(1, 30), 8)), 30)
        assert min(whole.bound, cut.bound) <= problem.seconds(ends)
        assert whole.seconds <= problem.seconds(ends)


def test_a_rank_has_the_memory_for_all_of_its_stages():
    """The first of three ranks' stages is small enough by itself, and with the fourth it is not."""
    layers = [Layer(name, 1, 2, parameters=1.0) for name in "abcdefgh"]
    plan = interleaved(2, 4)
    for memory, most in ((16, 4), (12, 3), (8, 2)):
        devices = [Device(memory=memory), Device()]
        begins = (0, *PartitionProblem(layers, devices, plan).best().ends)
        held = [end - begin for begin, end in itertools.pairwise(begins)]
        assert held[0] + held[2] == most
    with pytest.raises(UsageError, match="no cut into 4 stages fits"):
        PartitionProblem(layers, [Device(memory=7)] * 2, plan).best()
    large = [Layer("a", 1, 1), Layer("b", 1, 1, parameters=2**21), Layer("c", 1, 1), Layer("d", 1, 1)]
    with pytest.raises(UsageError, match="layer b takes 8.39 MB, and the largest device has 4.19 MB"):
        PartitionProblem(large, [Device(memory=2**22)] * 2, plan).best()


def test_saved_activations_count_as_the_schedule_holds_them():
    """By what a rank holds at each moment, of each of its stages, and not by the most of both."""
    layers = [Layer(str(number), 1, 2, saved=1.0) for number in range(6)]
    plan = interleaved(2, 4)
    for ends in every_cut(6, 4):
        sizes = [end - begin for begin, end in zip((0, *ends), ends, strict=False)]
        most = 0
        for rank in (0, 1):
            now = 0
            for action in plan.rank_actions[rank]:
                now += sizes[action.stage] * ((action.kind == "F") - (action.kind == "B"))
                most = max(most, now)
        fits = PartitionProblem(layers, [Device(memory=most)] * 2, plan).seconds(ends)
        assert fits < math.inf
        assert PartitionProblem(layers, [Device(memory=most - 0.5)] * 2, plan).seconds(ends) == math.inf


def seconds(name, chunks, link):
    layers = [Layer(str(number), 1, 1.5, 0.5) for number in range(8)]
    plan = make_schedule(name, 2, 4, chunks)
    return PartitionProblem(layers, [Device()] * 2, plan, link).best().seconds


def test_interleaving_is_faster_where_messages_are_quick_and_slower_where_they_are_slow():
    quick, slow = Link(latency=0.01), Link(latency=3.0)
    assert seconds("interleaved", 2, quick) < min(seconds(name, 1, quick) for name in ONE_STAGE_PER_RANK)
    assert seconds("interleaved", 2, slow) > min(seconds(name, 1, slow) for name in ONE_STAGE_PER_RANK)


def test_what_is_not_trained_so_is_refused():
    layers = [Layer(str(number), 1, 1) for number in range(4)]
    with pytest.raises(UsageError, match="forward only has several stages a rank: cuts are searched for such"):
        PartitionProblem(layers, [Device()] * 2, forward_only(2, 4, 2))
    with pytest.raises(UsageError, match="4 devices for a schedule of 4 stages on 2 ranks: give one for each rank"):
        PartitionProblem(layers, [Device()] * 4, interleaved(2, 4))
