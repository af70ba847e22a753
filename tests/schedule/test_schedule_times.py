"""Every schedule, of any size: right by construction, as quick as its formula says, and holding as little."""

from __future__ import annotations

import itertools
import random

import pytest

from samestep.errors import UsageError
from samestep.schedule.algorithms import (
    ONE_STAGE_PER_RANK,
    SCHEDULE_NAMES,
    fill_drain,
    forward_only,
    interleaved,
    make_schedule,
    one_f_one_b,
    zero_bubble,
)
from samestep.schedule.simulate import Costs, simulate

SIZES = list(itertools.product(range(1, 7), [*range(1, 11), 16]))
F, B = 1.0, 2.0  # seconds of a rank's forward and backward


def even_costs(stages, *, forward, backward, message=0.0, overlap=True):
    """Those of equal stages; half of a backward is for inputs."""
    half, messages = (backward / 2,) * stages, (message,) * (stages - 1)
    return Costs((forward,) * stages, half, half, messages, messages, overlap)


def seconds(plan, **costs):
    given = {"forward": F * plan.ranks / plan.stages, "backward": B * plan.ranks / plan.stages, **costs}
    return simulate(plan, even_costs(plan.stages, **given)).seconds


@pytest.mark.parametrize("name", ONE_STAGE_PER_RANK)
def test_alike_stages_take_what_the_formula_says(name):
    for p, m in SIZES:
        bubble = (p - 1) * (F + B / 2 - B / 2 if name == "zero-bubble" and m >= p else F + B)
        if name != "zero-bubble" or m >= p:
            assert seconds(make_schedule(name, p, m)) == pytest.approx(m * (F + B) + bubble)
        else:  # too few to fill it
            assert seconds(make_schedule(name, p, m)) <= m * (F + B) + bubble


@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
def test_interleaving_divides_the_bubble(chunks):
    for p, m in SIZES:
        bubble = (p - 1) * (F + B) / chunks
        if m >= p:
            assert seconds(interleaved(p, m, stages_per_rank=chunks)) == pytest.approx(m * (F + B) + bubble)
        else:
            assert interleaved(p, m, stages_per_rank=chunks).stages == p * chunks


def test_a_part_of_the_time_is_idle():
    for p, m in SIZES:
        timeline = simulate(fill_drain(p, m), even_costs(p, forward=F, backward=B))
        assert timeline.idle == pytest.approx((p - 1) / (m + p - 1))
        assert timeline.work == pytest.approx([m * (F + B)] * p)


def test_what_ranks_hold():
    for p, m in SIZES:
        for rank in range(p):
            assert fill_drain(p, m).peak_in_flight(rank) == m
            assert one_f_one_b(p, m).peak_in_flight(rank) == min(m, p - rank)
            assert one_f_one_b(p, m, eager=True).peak_in_flight(rank) == min(m, 2 * (p - 1 - rank) + 1)
            assert zero_bubble(p, m).peak_in_flight(rank) <= min(m, p)
            assert forward_only(p, m).peak_in_flight(rank) == 1


def uneven(stages, chance):
    forward = [chance.uniform(0.5, 1.5) for _ in range(stages)]
    return forward, [chance.uniform(1, 3) for _ in range(stages)]


def test_unlike_stages_under_fill_and_drain_take_exactly_the_formula():
    chance = random.Random(0)
    for p, m in itertools.product((1, 2, 4, 7), (1, 3, 16)):
        f, b = uneven(p, chance)
        found = simulate(fill_drain(p, m), Costs(f, b, [0] * p)).seconds
        assert found == pytest.approx(sum(f) + sum(b) + (m - 1) * (max(f) + max(b)))


def test_unlike_stages_under_1f1b_take_the_formula_at_most():
    chance = random.Random(1)
    for _ in range(100):
        f, b = uneven(4, chance)
        found = simulate(one_f_one_b(4, 16), Costs(f, b, [0] * 4)).seconds
        most = sum(f) + sum(b) + 15 * max(map(sum, zip(f, b, strict=True)))
        assert 0.9 * most < found <= most * (1 + 1e-12)


@pytest.mark.parametrize("message", [0.05, 0.1, 0.5])
def test_eager_1f1b_hides_messages_that_1f1b_waits_for(message):
    """Those of fill and drain, and of eager 1F1B, cost 2(p - 1)c; those of 1F1B more with every micro-batch."""
    p, m = 4, 16
    plain = seconds(fill_drain(p, m))
    assert seconds(fill_drain(p, m), message=message) == pytest.approx(plain + 2 * (p - 1) * message)
    assert seconds(one_f_one_b(p, m, eager=True), message=message) == pytest.approx(plain + 2 * (p - 1) * message)
    lost = seconds(one_f_one_b(p, m), message=message) - plain
    assert lost == pytest.approx(message * (2 * (p - 1) * m / p + 2 * (p - 2)))


def test_a_copy_beside_the_work_hides_and_one_in_its_place_does_not():
    p, m, copy = 2, 8, 0.3
    plan = fill_drain(p, m)
    beside, instead = (
        simulate(plan, even_costs(p, forward=F, backward=B, message=copy, overlap=way)) for way in (True, False)
    )
    assert beside.seconds == pytest.approx((m + p - 1) * (F + B) + 2 * (p - 1) * copy)
    assert instead.seconds >= (m + p - 1) * (F + B) + 2 * (m - 1) * copy
    assert sum(span.target is not None for span in instead.spans) == 2 * m


def told(spans, rank, target=None):
    mine = [span for span in spans if (span.rank, span.target) == (rank, target)]
    return [(str(span.action), span.begin, span.end) for span in mine]


def test_two_stages_and_four_micro_batches_by_hand():
    """Forwards of 1 second, backwards of 2, copies of a half: begins and ends of all, worked out on paper."""
    costs = {"forward": 1, "backward": 2, "message": 0.5}
    one, two = (simulate(fill_drain(2, 4), even_costs(2, **costs, overlap=beside)).spans for beside in (False, True))

    assert told(one, 0) == [
        *(("F0.0", 0, 1), ("F0.1", 1.5, 2.5), ("F0.2", 3, 4), ("F0.3", 4.5, 5.5)),
        *(("B0.0", 9.5, 11.5), ("B0.1", 12, 14), ("B0.2", 14.5, 16.5), ("B0.3", 17, 19)),
    ]
    assert told(one, 1) == [
        *(("F1.0", 1.5, 2.5), ("F1.1", 3, 4), ("F1.2", 4.5, 5.5), ("F1.3", 6, 7)),
        *(("B1.0", 7, 9), ("B1.1", 9.5, 11.5), ("B1.2", 12, 14), ("B1.3", 14.5, 16.5)),
    ]
    assert told(one, 0, 1) == [("F0.0", 1, 1.5), ("F0.1", 2.5, 3), ("F0.2", 4, 4.5), ("F0.3", 5.5, 6)]
    assert told(two, 0) == [
        *(("F0.0", 0, 1), ("F0.1", 1, 2), ("F0.2", 2, 3), ("F0.3", 3, 4)),
        *(("B0.0", 8, 10), ("B0.1", 10, 12), ("B0.2", 12, 14), ("B0.3", 14, 16)),
    ]
    assert told(two, 1, 0) == [("B1.0", 7.5, 8), ("B1.1", 9.5, 10), ("B1.2", 11.5, 12), ("B1.3", 13.5, 14)]
    assert simulate(one_f_one_b(2, 4), even_costs(2, **costs)).seconds == 17  # B0.0 waits for B1.0's, F1.2 for F0.2's


def test_who_sends_a_message_and_who_takes_it_are_kept_by_it():
    """By hand: sent a quarter behind a forward, there 1 later, and taken a quarter after that."""
    costs = Costs([1, 1], [1, 1], [1, 1], send_forward=[1], send_backward=[1], overhead=0.25)
    spans = simulate(one_f_one_b(2, 2), costs).spans
    assert told(spans, 0) == [("F0.0", 0, 1), ("F0.1", 1.25, 2.25), ("B0.0", 7, 9), ("B0.1", 10.5, 12.5)]
    assert told(spans, 1) == [("F1.0", 2.5, 3.5), ("B1.0", 3.5, 5.5), ("F1.1", 6, 7), ("B1.1", 7, 9)]
    assert told(spans, 1, 0) == [("B1.0", 5.75, 6.75), ("B1.1", 9.25, 10.25)]


def test_a_link_carries_one_message_at_a_time():
    """Messages longer than the work: they make the step."""
    m = 10
    timeline = simulate(forward_only(2, m), Costs([1, 1], [0, 0], [0, 0], send_forward=[3], send_backward=[0]))
    assert timeline.seconds == 1 + 3 * m + 1


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_nobody_does_two_things_at_once_nor_anything_before_it_can(name):
    chance = random.Random(5)
    for p, m in ((2, 3), (3, 7), (4, 8)):
        plan = make_schedule(name, p, m, 2 if name == "interleaved" else 1)
        f, b = uneven(plan.stages, chance)
        hops = [chance.uniform(0, 1) for _ in range(plan.stages - 1)]
        for beside in (True, False):
            timeline = simulate(plan, Costs(f, [x / 3 for x in b], [2 * x / 3 for x in b], hops, hops, overlap=beside))
            done = {span.action: span.end for span in timeline.spans if span.target is None}
            come = {span.action: span.end for span in timeline.spans if span.target is not None}
            for rank in range(p):
                mine = [one for one in timeline.spans if one.rank == rank and one.target is None]
                mine += [
                    one for one in timeline.spans if one.target == rank or (one.target is not None and one.rank == rank)
                ] * (not beside)
                mine.sort(key=lambda one: (one.begin, one.end))
                assert all(one.end <= other.begin + 1e-9 for one, other in itertools.pairwise(mine))
            for span in timeline.spans:
                if span.target is None:
                    for needed in plan.dependencies(span.action):
                        there = done if plan.placement[needed.stage] == span.rank else come
                        assert there[needed] <= span.begin + 1e-9


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (([1, 1], [1], [1, 1]), "costs of 2 forwards, 1 and 2 halves"),
        (([1, 1], [1, 1], [1, 1], [1, 1]), "2 stages send 1 messages"),
        (([1, -1], [1, 1], [1, 1]), "a time is negative, or no number"),
        (([1, float("nan")], [1, 1], [1, 1]), "a time is negative, or no number"),
    ],
)
def test_costs_that_make_no_sense_are_refused(given, said):
    with pytest.raises(UsageError, match=said):
        Costs(*given)


def test_costs_of_another_number_of_stages_are_refused():
    with pytest.raises(UsageError, match="costs of 3 stages, and the plan has 2"):
        simulate(fill_drain(2, 2), even_costs(3, forward=1, backward=1))
