"""A plan that exists is right: what breaks a rule cannot be made, and says where."""

from __future__ import annotations

import random

import pytest

from samestep.errors import UsageError
from samestep.schedule.algorithms import SCHEDULE_NAMES, fill_drain, forward_only, make_schedule
from samestep.schedule.schedule import Action, Schedule

PAIR = fill_drain(2, 2)


def orders(text):
    """One rank's actions a line: `F0.0 B0.0`."""
    return tuple(
        tuple(Action(word[0], *map(int, word[1:].split("."))) for word in line.split()) for line in text.split("|")
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("F0.0 F0.0 B0.0 | F1.0 B1.0", "F0.0 is done 2 times"),
        ("F0.0 B0.0 F0.1 | F1.0 B1.0", "rank 0 does F0.1, and there is no such stage or micro-batch"),
        ("F0.0 F1.0 B1.0 B0.0 | ", "rank 0 does F1.0, and the stage is on rank 1"),
        ("F0.0 B0.0 | F1.0", "of stage 1 and micro-batch 0 there is F"),
        ("F0.0 B0.0 | F1.0 I1.0", "of stage 1 and micro-batch 0 there is FI"),
        ("F0.0 B0.0 | F1.0 B1.0 W1.0", "of stage 1 and micro-batch 0 there is FBW"),
        (" | F1.0 B1.0", "of stage 0 and micro-batch 0 there is nothing"),
        ("B0.0 F0.0 | F1.0 B1.0", "rank 0 waits in B0.0 for F0.0, which is never done"),
        ("F0.0 B0.0 | F1.0 W1.0 I1.0", "rank 1 waits in W1.0 for I1.0, which is never done"),
    ],
)
def test_what_is_not_complete_or_not_possible_is_refused(text, said):
    with pytest.raises(UsageError, match=f"^by hand: {said}"):
        Schedule("by hand", 1, (0, 1), orders(text))


def test_gradients_are_added_up_in_the_order_of_the_micro_batches():
    text = "F0.0 F0.1 B0.1 B0.0 | F1.0 F1.1 B1.1 B1.0"
    with pytest.raises(UsageError, match=r"stage 0 adds up the gradients of the micro-batches in the order \[1, 0\]"):
        Schedule("by hand", 2, (0, 1), orders(text))


def test_ranks_that_wait_for_each_other_are_refused_before_anything_runs():
    """Rank 0 takes a backward before the forward that rank 1 needs to get there."""
    text = "F0.0 B0.0 F0.1 B0.1 | F1.0 F1.1 B1.0 B1.1"
    with pytest.raises(UsageError, match="waits in B0.0 for B1.0, which is never done: the ranks wait for each other"):
        Schedule("by hand", 2, (0, 1), orders(text))


def test_a_rank_without_a_stage_and_a_step_without_micro_batches_are_refused():
    with pytest.raises(UsageError, match="2 ranks hold the stages"):
        Schedule("by hand", 1, (0, 0), PAIR.rank_actions)
    with pytest.raises(UsageError, match="a step cannot have 0 micro-batches"):
        Schedule("by hand", 0, (0, 1), ((), ()))
    for ranks, micro_batches in ((0, 2), (2, 0)):
        for name in SCHEDULE_NAMES:
            with pytest.raises(UsageError, match=r"a pipeline cannot have 0 (ranks|micro-batches)"):
                make_schedule(name, ranks, micro_batches)
    with pytest.raises(UsageError, match="cannot have 0 stages a rank"):
        make_schedule("interleaved", 2, 2, 0)
    with pytest.raises(UsageError, match="forward only: 2 ranks hold the stages"):
        forward_only(2, 2, 0)
    with pytest.raises(UsageError, match="there is no schedule 'gpipe': fill-drain, 1f1b,"):
        make_schedule("gpipe", 2, 2)
    with pytest.raises(UsageError, match="1f1b has one stage a rank; 2 are for 'interleaved'"):
        make_schedule("1f1b", 2, 2, 2)


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_every_mutation_of_a_schedule_is_refused_or_right(name):
    """Two of a rank's actions change places: the plan is refused, or everything still comes behind what it needs."""
    chance = random.Random(3)
    plan = make_schedule(name, 3, 4, 2 if name == "interleaved" else 1)
    refused = 0
    for _ in range(200):
        changed = [list(order) for order in plan.rank_actions]
        order = chance.choice(changed)
        one, other = chance.sample(range(len(order)), 2)
        order[one], order[other] = order[other], order[one]
        try:
            made = Schedule("changed", plan.micro_batches, plan.placement, tuple(map(tuple, changed)))
        except UsageError:
            refused += 1
            continue
        done = set()
        for rank, action in made.topological_order:
            assert made.placement[action.stage] == rank
            assert all(needed in done for needed in made.dependencies(action))
            done.add(action)
        assert len(done) == sum(map(len, plan.rank_actions))
    assert 100 < refused < 200
