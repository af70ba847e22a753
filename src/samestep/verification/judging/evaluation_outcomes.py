"""What each evaluation of a process comes to: the sums it forms, and the lines it prints, after its data."""

from __future__ import annotations

import re
from bisect import bisect
from collections import Counter
from dataclasses import dataclass, field

from samestep.verification.journal import Event
from samestep.verification.judging.record import PassKey, Rank, pass_of

_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?|\b(?:nan|inf)\b", re.IGNORECASE)

_LABEL = re.compile(r"\W*(?:[^\W\d]+\s+)?(\d+)\s*:(?=\s)")  # what the line is about: "fold 2: loss 0.31", "2016: 0.8"

Place = tuple[str, str, str, int]  # phase; where; after which batches, or how it is worded; number


@dataclass
class Outcome:
    """One evaluation of one process.

    Attributes:
        loaders: those whose batches it took, in order.
        sums: what collectives brought when all batches of a loader were through, by place.
        lines: what was printed then, by place.
        by_batch: whether the output for one sample depended on the others of its batch.
        brings_together: whether anything was brought together that is of all ranks.
        gathers: whether rows of all ranks were, of which some may be taken out again.
        batches: how many it took.
        rows: how many samples these have.
    """

    loaders: list[str] = field(default_factory=list)
    sums: dict[Place, Event] = field(default_factory=dict)
    lines: dict[Place, Event] = field(default_factory=dict)
    by_batch: bool = False
    brings_together: bool = False
    gathers: bool = False
    batches: int = 0
    rows: int = 0


def outcomes(rank: Rank) -> dict[str, Outcome]:
    """Returns the evaluations of a process, by phase: those in which data went through a model without gradients."""
    phases: dict[str, list[Event]] = {}
    of_pass: dict[tuple[str, int], set[str]] = {}
    for event in rank.of("evaluated", "ran", "passed", "collected", "printed"):
        if event["kind"] == "evaluated":
            of_pass.setdefault(pass_of(event), set()).add(event["phase"])
        for phase in of_pass.get(pass_of(event), ()) if event["kind"] == "passed" else (event["phase"],):
            phases.setdefault(phase, []).append(event)
    sizes = {(pass_of(event), event["index"]): event["size"] for event in rank.of("batch")}
    return {
        phase: _outcome(phase, events, sizes, rank.number)
        for phase, events in phases.items()
        if any(event["kind"] in {"evaluated", "ran"} for event in events)
    }


def _outcome(phase: str, events: list[Event], sizes: dict[tuple[PassKey, int], int], rank: int) -> Outcome:
    outcome = Outcome(by_batch=any(event.get("by_batch") for event in events))
    outcome.brings_together = any(event["kind"] == "collected" for event in events)
    outcome.gathers = any("rows" in event for event in events)
    taken = [(pass_of(event), event["index"]) for event in events if event["kind"] == "evaluated"]
    outcome.batches, outcome.rows = len(taken), sum(sizes.get(batch, 0) for batch in taken)
    final = _final(events)
    passes: list[str] = []
    seen: Counter[tuple[str, str]] = Counter()
    stretch: list[Event] = []  # sums since the last batch
    for event, is_final in zip(events, final, strict=True):
        if event["kind"] == "evaluated":
            _take(phase, stretch, passes, outcome, seen)
            if event["key"] not in passes[-1:]:
                passes.append(event["key"])
        elif event["kind"] == "collected" and is_final and "values" in event:
            stretch.append(event)
        elif event["kind"] == "printed" and is_final:
            outcome.lines[_place(phase, _labelled(event, rank), seen)] = event
    _take(phase, stretch, passes, outcome, seen)
    outcome.loaders = passes
    return outcome


def _take(
    phase: str, stretch: list[Event], passes: list[str], outcome: Outcome, seen: Counter[tuple[str, str]]
) -> None:
    """Adds the sums of a stretch; of those from one line the last has the same number in every process."""
    for event in reversed(_last_of_chains(stretch)):
        outcome.sums[_place(phase, (event["where"], " ".join(passes)), seen)] = event
    stretch.clear()


def _place(phase: str, what: tuple[str, str], seen: Counter[tuple[str, str]]) -> Place:
    seen[what] += 1
    return phase, *what, seen[what]


def _last_of_chains(sums: list[Event]) -> list[Event]:
    """What is summed over some of the ranks, and then over others, comes to its end with the last of these sums."""
    ends = []
    for index, event in enumerate(sums):
        size, group = len(event["values"]), event["group"]
        goes_on = any(len(later["values"]) == size and later["group"] != group for later in sums[index + 1 :])
        if group == "world" or not goes_on:
            ends.append(event)
    return ends


def _final(events: list[Event]) -> list[bool]:
    """Whether each event comes when its data are through, or is a state on the way there.

    A DataLoader's pass says when it is over, unless a loop has left it: then a line that it has printed before its last
    batch is on the way, too. Without a DataLoader, what is repeated between two forwards is on the way.
    """
    last = {pass_of(event): i for i, event in enumerate(events) if "key" in event}
    over = {pass_of(event) for event in events if event["kind"] == "passed"}
    first = {pass_of(event): i for i, event in reversed([*enumerate(events)]) if event["kind"] == "evaluated"}
    left = [(first[name], end) for name, end in last.items() if name not in over and name in first]
    rans = [i for i, event in enumerate(events) if event["kind"] == "ran"]
    loads = any(event["kind"] == "evaluated" for event in events)
    known: dict[tuple[str, str], list[int]] = {}  # a line, as it is worded -> where it stands
    for i, event in enumerate(events):
        known.setdefault(_line(event), []).append(i)
    final, goes_on = [], -1
    for i, event in enumerate(events):
        if event["kind"] == "evaluated":
            goes_on = last[event["key"], event["number"]]
        if loads:
            is_repeated = event["kind"] == "printed" and any(
                begin < place < end < i for place in known[_line(event)] for begin, end in left
            )
            final.append(i > goes_on and not is_repeated)
            continue
        repeated = known[_line(event)]
        between = bisect(rans, repeated[0]) < bisect(rans, repeated[-1])
        through = event["kind"] == "collected" and i > rans[-1]  # a sum that is formed anew is the last of its kind
        final.append(through or not between)
    return final


def _line(event: Event) -> tuple[str, str]:
    words = "".join(_NUMBER.sub("#", event.get("text", "")).split())  # numbers may be padded to one width
    return event.get("where", ""), words


def _labelled(event: Event, rank: int) -> tuple[str, str]:
    """A line by its wording, and by the number of what it is about, unless that is the rank."""
    found = _LABEL.match(event.get("text", ""))
    where, words = _line(event)
    return where, words if found is None or int(found[1]) == rank else f"{found[1]} {words}"
