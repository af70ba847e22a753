"""Backwards in two parts, so that a rank that would wait computes gradients of weights, for which nobody waits.

    rank 0   F0  F1  ──  I0  F2  I1  W0  F3  I2  W1  …          I: for the stage before
    rank 1   ──  F0  I0  F1  I1  W0  F2  …                      W: for the optimizer, any time

With f, i and w seconds for the three, what ranks stand still shrinks from (p - 1)(f + i + w) to (p - 1)(f + i - w). It
never becomes nothing within a step: the name is of steps that overlap, and of optimizers that take a step back.

The order is found by playing it with actions that all take as long. At each moment rank r does the first of these that
it can do, and holds at most p micro-batches, as many as the first rank does in 1F1B:

    1  F, while fewer than p - r of its micro-batches have gone ahead and not come back
    2  I
    3  W

Source: P. Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024 (its ZB-H1).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from samestep.schedule.plan import Action, Schedule, check_sizes, straight

__all__: list[str] = []


@dataclass
class _Rank:
    """One rank at play.

    Attributes:
        stage: that it holds.
        order: what it has done.
        forwards: done.
        inputs: backwards whose first part is done.
        weights: whose second part is.
    """

    stage: int
    order: list[Action] = field(default_factory=list)
    forwards: int = 0
    inputs: int = 0
    weights: int = 0


def zero_bubble(ranks: int, micro_batches: int) -> Schedule:
    """Returns the plan.

    Args:
        ranks: with one stage each.
        micro_batches: of a step.

    >>> plan = zero_bubble(4, 8)
    >>> [plan.most_held(rank) for rank in range(4)]
    [4, 4, 4, 4]
    """
    check_sizes("zero bubble", ranks, micro_batches)
    playing = [_Rank(stage) for stage in range(ranks)]
    while any(one.weights < micro_batches for one in playing):
        chosen = [_choice(one, playing, micro_batches) for one in playing]  # by what was done before this moment
        for one, action in zip(playing, chosen, strict=True):
            if action is not None:
                _do(one, action)
    return Schedule("zero bubble", micro_batches, straight(ranks), tuple(tuple(one.order) for one in playing))


def _choice(one: _Rank, playing: list[_Rank], micro_batches: int) -> Action | None:
    before = playing[one.stage - 1].forwards if one.stage else micro_batches
    behind = playing[one.stage + 1].inputs if one.stage + 1 < len(playing) else one.forwards
    ahead, held = one.forwards - one.inputs, one.forwards - one.weights
    if one.forwards < before and ahead < len(playing) - one.stage and held < len(playing):
        return Action("F", one.stage, one.forwards)
    if one.inputs < min(behind, one.forwards):
        return Action("I", one.stage, one.inputs)
    if one.weights < one.inputs:
        return Action("W", one.stage, one.weights)
    return None


def _do(one: _Rank, action: Action) -> None:
    one.order.append(action)
    one.forwards += action.kind == "F"
    one.inputs += action.kind == "I"
    one.weights += action.kind == "W"
