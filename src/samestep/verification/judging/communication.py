"""Whether the ranks communicate in one order, and what each waits for when they do not come back.

Ranks may call one collective from different lines (`if rank == 0: … else: …`), so lines alone prove nothing. Two
lines that both ranks come by, in another order, do.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile

from samestep.instrument.collective_call import UNEVEN
from samestep.verification.findings import PROVED, Finding, unchecked
from samestep.verification.journal import Event
from samestep.verification.judging.record import Rank, Record
from samestep.verification.report import Report

_AHEAD = 8  # calls within which two exchanged ones are looked for
_ROOTED = {"broadcast", "reduce", "scatter", "gather", "broadcast_object_list", "scatter_object_list", "gather_object"}


def judge(record: Record, report: Report) -> None:
    if record.size < 2:
        report.cover("communication", unchecked("there is one rank"))
        return
    first, *others = (_before(rank, record.uneven) for rank in record.ranks)
    for other in others:
        if found := first_difference(first, other):
            report.add([found])
            return
    sends = any(rank.of("collective") or rank.steps for rank in record.ranks)  # backward passes send in native code
    report.cover("communication", PROVED if sends else unchecked("the ranks send each other nothing"))


def _before(rank: Rank, uneven: Event | None) -> Rank:
    """What a rank calls until another has used its inputs up, and answers calls of torch's own under Join."""
    if uneven is None:
        return rank
    return Rank(rank.number, [event for event in rank.events if event.get("window", 0) < uneven["event"]])


def first_difference(first: Rank, other: Rank) -> Finding | None:
    """Returns what the first call that differs is, if there is one."""
    return next(_compared(first, other), None)


def calls(rank: Rank) -> list[Event]:
    """Returns a rank's collectives of more than two, in order."""
    return list(filter(_is_of_several, rank.of("collective")))


def _is_of_several(event: Event) -> bool:
    return event["kind"] == "collective" and not (event["between_two"] or event.get("of_members"))


def _compared(first: Rank, other: Rank) -> Iterator[Finding]:
    groups = {call["group"] for call in calls(first)} & {call["group"] for call in calls(other)}
    for group in sorted(groups):
        mine = [call for call in calls(first) if call["group"] == group]
        theirs = [call for call in calls(other) if call["group"] == group]
        for one, two in zip(mine, theirs, strict=False):
            if _signature(one) == _signature(two) and one["where"] == two["where"]:
                continue
            is_of_root = _is_of_root(one, two, {first.number, other.number})
            if not is_of_root and _are_exchanged((first, one), (other, two)):
                yield _order(other, one, two)
                return
            if _signature(one) != _signature(two):
                yield _mismatch(other, one, two)
                return


def _signature(call: Event) -> tuple[object, ...]:
    """What has to be alike on all ranks; what a call leaves out is what torch takes: root 0, and a sum."""
    root = call["root"] or 0
    if call["op"] in {"barrier", "monitored_barrier"} or "object" in call["op"]:
        return (call["op"], root)
    shapes = [] if call["op"] in UNEVEN else [shape or [1] for shape in call["shapes"]]  # one number has two shapes
    return (call["op"], root, call["reduce"] or "SUM", str(shapes), str(call["dtypes"][:1]))


def _is_of_root(one: Event, two: Event, ranks: set[int]) -> bool:
    """Whether the one of two ranks sends, at a line of its own, what the other receives, or the other way round."""
    return one["op"] in _ROOTED and _signature(one) == _signature(two) and (one["root"] or 0) in ranks


def _are_exchanged(mine: tuple[Rank, Event], theirs: tuple[Rank, Event]) -> bool:
    """Whether each of two ranks comes by the other's line, too, within one batch; from batch to batch it may choose."""
    here, there = mine[1]["where"], theirs[1]["where"]
    return here != there and here in _lines_ahead(*theirs) and there in _lines_ahead(*mine)


def _lines_ahead(rank: Rank, call: Event) -> set[str]:
    """The lines of a group's next calls in a step, until a rank has a new batch or another backward pass begins."""
    events = rank.by_window[call["window"]]
    behind = events[next(place for place, event in enumerate(events) if event is call) + 1 :]
    same = takewhile(lambda event: event["kind"] not in {"batch", "backward"}, behind)
    ahead = [event for event in same if _is_of_several(event) and event["group"] == call["group"]]
    return {event["where"] for event in ahead[: _AHEAD - 1]}


def _order(other: Rank, one: Event, two: Event) -> Finding:
    return Finding(
        code="collective-order",
        rank=other.number,
        step=two["window"],
        where=two["where"],
        cause=f"rank {other.number} calls {two['op']} at {two['where']} while rank 0 calls {one['op']} at "
        f"{one['where']}, and later the other way round: what was meant for one goes into the other",
        fix="call collectives in one order on all ranks",
    )


def _mismatch(other: Rank, one: Event, two: Event) -> Finding:
    return Finding(
        code="collective-mismatch",
        rank=other.number,
        where=two["where"],
        cause=f"rank {other.number} calls {_told(two)} where rank 0 calls {_told(one)}",
        fix="let all ranks call the same operation, with tensors of one shape and type",
    )


def _told(call: Event) -> str:
    form = f" of {call['dtypes'][0]} {call['shapes'][0]}" if call["shapes"] else ""
    return f"{call['op']}{form} at {call['where']}"


def waited_for(record: Record, rank: int | None, where: str | None) -> tuple[str, str] | None:
    """Returns where the rank is that others wait for in a barrier, and what it does there; None where nobody does.

    A barrier is a place to wait in, not a fault: who does something else meanwhile has done too much, or too little.
    """
    failed = next((one for one in record.ranks if one.number == rank), None)
    last = failed and next(reversed(calls(failed)), None)
    if failed is None or not last or last["where"] != where or "barrier" not in last["op"]:
        return None
    counts = {one.number: len(one.of("backward")) for one in record.ranks}
    most = max(record.ranks, key=lambda one: counts[one.number])
    if counts[most.number] <= counts[failed.number]:
        return None
    begun = most.of("backward")[-1]["where"]
    counted = f"rank {most.number} has begun {counts[most.number]} backward passes, rank {rank} {counts[failed.number]}"
    return begun, f" (it waits in a barrier, while {counted})"


def stuck(record: Record) -> Finding:
    """Returns the finding for a run in which nothing moved any more: who waits where, and for whom."""
    last = {rank.number: next(reversed(calls(rank)), None) for rank in record.ranks}
    counts = {rank.number: len(calls(rank)) for rank in record.ranks}
    most = max(counts.values(), default=0)
    waiting = [number for number, count in counts.items() if count == most]
    missing = [number for number, count in counts.items() if count < most]
    gone = [rank.number for rank in record.ranks if rank.ended is not None]
    culprit = next(iter(gone or missing), None)
    where = last[waiting[0]] if waiting else None
    cause = "no rank makes progress"
    if where is not None:
        cause = f"rank {waiting[0]} waits in {where['op']} at {where['where']}"
    if culprit is not None:
        there = last[culprit]
        has = "has ended" if culprit in gone else "is not in it"
        behind = f"; its last collective was {there['op']} at {there['where']}" if there is not None else ""
        cause += f" for rank {culprit}, which {has}{behind}"
    return Finding(
        code="hang",
        rank=culprit,
        step=len(record.ranks[0].steps) if record.ranks else None,
        where=None if where is None else where["where"],
        cause=cause,
        fix="let every rank come by every collective: no collective under a condition that ranks may see differently",
    )
