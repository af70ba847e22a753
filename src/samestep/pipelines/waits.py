"""How short a step can be at best, where ranks have several stages: sums of what stages cost, whichever is the largest.

Follow a micro-batch to a rank, wait there while it does its work, and follow a micro-batch back:

    rank 0   F0.0 ─┐                                        ┌─ B0.3
    rank 1         └─▶ F1.0  all that it does from here … B1.3

Each thing done waits for the one before it, so no step is shorter. One may get to the rank with a forward or a backward
of micro-batch 0, through any of its stages, and leave it with the last backward of any. Of stages that are alike, the
first way in and the last way out are m(f + b) + (p - 1)(f + b) / v of a rank's f and b: what interleaving takes. In all
of them a stage counts by its own, so they can be searched as :mod:`samestep.pipelines.bounds` is; the mean over the
ranks, which the largest is never below, knows besides that what one rank is spared another has to do.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise

from samestep.schedule.plan import ADDS, Action, Order, Schedule

__all__: list[str] = []

# (kind of action, stage) -> how often; "hop": the message between it and the one before, "hand": one that it handles
Row = Counter[tuple[str, int]]


def rows(plan: Schedule, *, beside: bool) -> dict[int, list[Row]]:
    """Returns, by rank, sums that no step undercuts; as many of each, in the same order.

    Args:
        plan: of forwards and whole backwards.
        beside: whether messages travel beside the work.

    Example:
        >>> from samestep.schedule.interleaved import interleaved
        >>> row = rows(interleaved(2, 4), beside=True)[1][0]
        >>> row["F", 0], row["F", 1], row["B", 3], row["hop", 1]
        (1, 4, 4, 2)
    """
    return {rank: list(_of(plan, rank, order, beside=beside)) for rank, order in enumerate(plan.orders)}


def _of(plan: Schedule, rank: int, order: Order, *, beside: bool) -> Iterator[Row]:
    own = [stage for stage, holder in enumerate(plan.placement) if holder == rank]
    place = {action: number for number, action in enumerate(order)}
    firsts = [Action(kind, stage, 0) for kind in ("F", "B") for stage in own]
    lasts = [Action("B", stage, plan.micro_batches - 1) for stage in own]
    for first in firsts:
        for last in lasts:
            if place[last] < place[first]:
                last = order[-1]
            between = order[place[first] : place[last] + 1]
            work = Row((action.kind, action.stage) for action in between)
            work += _handled(plan, between)
            if not beside:
                work += Row(hop for action in between[:-1] if (hop := _sent(plan, action)))
            yield _way(plan, first) + work + _back(plan, last.stage)


def _hops(plan: Schedule, stages: Sequence[int]) -> Row:
    """Messages along a line of stages."""
    pairs = [pair for pair in pairwise(stages) if plan.placement[pair[0]] != plan.placement[pair[1]]]
    return Row(("hop", max(pair)) for pair in pairs) + Row(("hand", stage) for pair in pairs for stage in pair)


def _handled(plan: Schedule, between: Sequence[Action]) -> Row:
    """Messages that a rank takes and sends while one waits there, without those that lead to it and away from it."""
    found = Row()
    for place, action in enumerate(between):
        taken = plan.taken(action) if place else 0
        given = plan.given(action) if place + 1 < len(between) else 0
        found["hand", action.stage] += taken + given
    return found


def _way(plan: Schedule, action: Action) -> Row:
    """What comes before an action of micro-batch 0."""
    stages = range(plan.stages)
    if action.kind == "F":
        return Row(("F", stage) for stage in stages[: action.stage]) + _hops(plan, stages[: action.stage + 1])
    turn = stages[action.stage :][::-1]
    there = Row(("F", stage) for stage in stages) + _hops(plan, stages)
    return there + Row(("B", stage) for stage in turn[:-1]) + _hops(plan, turn)


def _back(plan: Schedule, stage: int) -> Row:
    """What comes after a backward."""
    stages = range(stage, -1, -1)
    return Row(("B", one) for one in stages[1:]) + _hops(plan, stages)


def _sent(plan: Schedule, action: Action) -> tuple[str, int] | None:
    """The message that an action makes, if another rank takes it."""
    taker = plan.taker(action)
    if taker is None or taker == plan.placement[action.stage]:
        return None
    return "hop", action.stage + (action.kind == "F")


def held(plan: Schedule, rank: int) -> list[dict[int, int]]:
    """Returns by stage of a rank how many micro-batches' activations it holds, at all times at which that is most.

    >>> from samestep.schedule.interleaved import interleaved
    >>> held(interleaved(2, 4), 1)
    [{1: 2, 3: 1}, {1: 3, 3: 0}]
    """
    now: defaultdict[int, int] = defaultdict(int)
    found: list[dict[int, int]] = []
    for action in plan.orders[rank]:
        now[action.stage] += (action.kind == "F") - (action.kind in ADDS)
        if not any(all(now[stage] <= one.get(stage, 0) for stage in now) for one in found):
            found = [one for one in found if not all(one[stage] <= now[stage] for stage in one)] + [dict(now)]
    return found
