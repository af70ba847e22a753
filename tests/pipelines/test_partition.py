"""Cuts of a chain: none of all that there are makes a shorter step, and what cannot be cut says why."""

from __future__ import annotations

import math
import random

import pytest
from chains import chain, every_cut

from samestep.errors import UsageError
from samestep.pipelines.layers import Device, Layer, Link
from samestep.pipelines.partition import PartitionProblem
from samestep.schedule.algorithms import (
    ONE_STAGE_PER_RANK,
    fill_drain,
    forward_only,
    interleaved,
    make_schedule,
    one_f_one_b,
)


def drawn(chance, name):
    """A problem of any kind: devices unlike, memory short, links slow, layers tied."""
    count = chance.randint(2, 9)
    stages = chance.randint(1, min(4, count))
    devices = [Device(chance.choice([1, 1, 0.5, 2]), chance.choice([math.inf, 30])) for _ in range(stages)]
    link = Link(0.2 * chance.random(), chance.choice([math.inf, 2, 10]), chance.random() < 0.7, chance.choice([0, 0.3]))
    tied = [frozenset(chance.sample(range(count), 2))] if chance.random() < 0.3 else []
    return PartitionProblem(
        chain(chance, count), devices, make_schedule(name, stages, chance.randint(1, 12)), link, colocated=tied
    )


@pytest.mark.parametrize("name", ONE_STAGE_PER_RANK)
def test_no_cut_of_all_is_better_on_any_of_many_random_chains(name):
    chance = random.Random(0)
    impossible = simulated = cuts = 0
    for _ in range(40):
        problem = drawn(chance, name)
        every = every_cut(len(problem.layers), len(problem.devices))
        least = min(map(problem.seconds, every))
        if least == math.inf:
            impossible += 1
            with pytest.raises(UsageError):
                problem.best()
            continue
        best = problem.best()
        assert best.bound == best.seconds == least
        assert problem.seconds(best.ends) == best.seconds
        simulated, cuts = simulated + best.simulated, cuts + len(every)
    assert 1 < impossible < 25
    assert simulated < cuts / 4


def at_least(problem, ends):
    """The bound of a step that is cut so; inf where a device has too little memory."""
    costs, stages = problem.segments, list(enumerate(zip((0, *ends), ends, strict=False)))
    if not costs.fits(ends):
        return math.inf
    total, forwards, remaining = (
        [float(terms[stage][pair]) for stage, pair in stages] for terms in (costs.sums, costs.forwards, costs.remaining)
    )
    return sum(total) + costs.before * max(forwards) + max(remaining)


@pytest.mark.parametrize("name", ONE_STAGE_PER_RANK)
def test_no_step_is_shorter_than_its_bound(name):
    chance = random.Random(1)
    for _ in range(30):
        problem = drawn(chance, name)
        for ends in every_cut(len(problem.layers), len(problem.devices)):
            seconds, bound = problem.seconds(ends), at_least(problem, ends)
            assert bound <= seconds * (1 + 1e-12)
            assert (bound == math.inf) == (seconds == math.inf)


def test_the_bound_of_fill_and_drain_is_what_it_takes():
    chance = random.Random(2)
    for _ in range(60):
        link = Link(0.1, 4, overhead=chance.choice([0.0, 0.2]))
        problem = PartitionProblem(chain(chance, 7), [Device(), Device(2), Device()], fill_drain(3, 6), link)
        for ends in every_cut(7, 3):
            assert at_least(problem, ends) == pytest.approx(problem.seconds(ends))


def test_an_evaluation_is_cut_by_its_forwards():
    chance = random.Random(3)
    problem = PartitionProblem(chain(chance, 8), [Device()] * 3, forward_only(3, 10), Link(0.1, 4))
    assert problem.best().seconds == min(map(problem.seconds, every_cut(8, 3)))


def test_what_has_not_been_simulated_is_told_as_a_gap():
    chance = random.Random(8)
    problem = PartitionProblem(chain(chance, 30), [Device()] * 6, one_f_one_b(6, 8))
    whole, cut = problem.best(), problem.best(max_simulated=1)
    assert whole.simulated > cut.simulated == 1
    assert cut.bound < whole.seconds <= cut.seconds
    assert whole.bound == whole.seconds
    assert 0.8 * cut.seconds < cut.bound < cut.seconds


def test_forward_times_alone_cut_elsewhere():
    """Layers whose backward is unlike their forward: a split by forward time is not the best."""
    layers = [Layer("a", 1, 6), Layer("b", 1, 1), Layer("c", 1, 1), Layer("d", 1, 1)]
    assert PartitionProblem(layers, [Device()] * 2, one_f_one_b(2, 8)).best().ends == (1, 4)
    by_forward = [Layer(layer.name, layer.forward, 0) for layer in layers]
    assert PartitionProblem(by_forward, [Device()] * 2, one_f_one_b(2, 8)).best().ends == (2, 4)


def test_a_slow_link_moves_the_cut_to_where_little_crosses_it():
    layers = [Layer(name, 1, 2, activations=size) for name, size in zip("abcd", (9, 9, 1, 0), strict=True)]
    plan = one_f_one_b(2, 4)
    assert PartitionProblem(layers, [Device()] * 2, plan).best().ends == (2, 4)
    assert PartitionProblem(layers, [Device()] * 2, plan, Link(bandwidth=0.5)).best().ends == (3, 4)


def test_what_a_schedule_holds_moves_the_cut():
    layers = [Layer(name, 1, 2, saved=1.0) for name in "abcdef"]
    devices = [Device(memory=16), Device(memory=1000)]
    assert PartitionProblem(layers, devices, fill_drain(2, 8)).best().ends == (2, 6)
    assert PartitionProblem(layers, devices, one_f_one_b(2, 8)).best().ends == (3, 6)


def test_layers_that_share_a_weight_stay_together():
    layers = [Layer(name, 1, 2) for name in "abcd"]
    plan = one_f_one_b(2, 4)
    assert PartitionProblem(layers, [Device()] * 2, plan, colocated=[frozenset({1, 2})]).best().ends in {(1, 4), (3, 4)}
    with pytest.raises(UsageError, match="no 2 stages can be cut without parting layers that share a weight: a, d"):
        PartitionProblem(layers, [Device()] * 2, plan, colocated=[frozenset({0, 3})]).best()


def test_a_device_three_times_as_quick_gets_three_times_as_much():
    layers = [Layer(str(number), 1, 2) for number in range(8)]
    assert PartitionProblem(layers, [Device(), Device(speed=3)], one_f_one_b(2, 8)).best().ends == (2, 8)


def of(layers, *, memory=math.inf, plan=one_f_one_b, micro_batches=8):
    return PartitionProblem(layers, [Device(memory=memory)] * 2, plan(2, micro_batches)).best()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: of([Layer("a", 1, 1)]), "2 stages of 1 layers: a stage must have one layer"),
        (lambda: PartitionProblem([Layer("a", 1, 1)], [], fill_drain(2, 4)), "a model cannot be cut into 0 stages"),
        (lambda: of([Layer("a", 1, 1)] * 3, plan=interleaved), "4 stages of 3 layers"),
        (lambda: Layer("a", -1, 1), "layer a: forward=-1 is negative, or no number"),
        (lambda: Layer("a", 1, float("nan")), "layer a: inputs=nan"),
        (lambda: Device(speed=0), "a device of speed 0"),
        (lambda: Link(bandwidth=0), "a link of 0.0 s, 0 bytes a second and 0.0 s of overhead"),
        (
            lambda: of([Layer("a", 1, 1, saved=2**20), Layer("b", 1, 1)], memory=2**22, plan=fill_drain),
            "layer a takes 8.39 MB, and the largest device has 4.19 MB",
        ),
        (
            lambda: of([Layer(name, 1, 1, parameters=2**20) for name in "abc"], memory=2**22),
            "no cut into 2 stages fits: the largest device has 4.19 MB; take smaller micro-batches",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_its_reason(make, said):
    with pytest.raises(UsageError, match=said):
        make()
