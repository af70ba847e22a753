"""Compares ranks that step by themselves and average their parameters now and then, as their script declares.

One process takes the samples of the first rank, or of the ranks that have averaged their gradients with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from samestep.text import listed
from samestep.verification.findings import AGREES, DECLARED, REFUTED, unchecked
from samestep.verification.journal import Event
from samestep.verification.judging.record import Rank, Record
from samestep.verification.judging.states import differing_ranks
from samestep.verification.report import Report

Compare = Callable[[list[int], list[Event], Report], None]


def judge(record: Record, declared: Event, steps: list[Event], compare: Compare, report: Report) -> None:
    """Adds what the gradients of these steps are beside one process that has the samples of as many ranks.

    Args:
        record: of all ranks.
        declared: the event that says how often they are averaged.
        steps: those of the first rank whose gradients are kept.
        compare: compares the gradients of some ranks, which have averaged them, at some steps with one process.
        report: gets what is found.
    """
    how = f"local steps, averaged every {declared['every']} ({declared['how']})"
    margins = []
    for ranks, theirs in _groups(record, steps):
        found = Report(ranks=len(ranks))
        compare(ranks, theirs, found)
        report.add(found.findings)
        state = found.coverage["gradients"]
        if state not in {AGREES, DECLARED}:
            report.cover("gradients", state if state == REFUTED else unchecked(f"{how}; {state.partition(': ')[2]}"))
            return
        margins.append(f"samples of {listed([f'rank {rank}' for rank in ranks])}: {found.margins['gradients']}")
    if margins:
        report.cover("gradients", DECLARED, f"{how}; {'; '.join(margins)}")


def _groups(record: Record, steps: list[Event]) -> Iterator[tuple[list[int], list[Event]]]:
    """Yields the ranks that have the first one's gradients, and at which steps; the smallest group first."""
    groups: dict[tuple[int, ...], list[Event]] = {}
    for step in steps:
        if not _is_averaged_within(record.ranks[0], step):
            groups.setdefault(_alike(record, step["event"]), []).append(step)
    for ranks in sorted(groups, key=len):
        yield [*ranks], groups[ranks]


def _alike(record: Record, index: int) -> tuple[int, ...]:
    events = record.events_of_step(index)
    ranks = zip(record.ranks, events, strict=True)
    return tuple(rank.number for rank, one in ranks if differing_ranks([events[0], one], "gradients") is None)


def _is_averaged_within(rank: Rank, step: Event) -> bool:
    """Whether parameters were averaged between the backward passes of one step."""
    kinds = [event["kind"] for event in rank.in_window(step["window"], "average", "backward")]
    return "average" in kinds and "backward" in kinds[: kinds.index("average")]
