"""How much of the communication passes beside the backward pass, and which calls of the script cost most.

    backward ──────────────┐ wait ────┐            bucket 0 is reduced while the backward goes on: hidden
      bucket 0  ├────┤                             bucket 1 is not: its last part is what the step waits for
      bucket 1           ├────────────┤

Whoever fills buckets says when one is full; when it was sent and when it was back, only samestep's own reductions say.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean

from samestep.reporting.run_log import Event, RankLog, measured
from samestep.reporting.steps import WAITS, valid_steps

LOOKED_AT = 400  # lines of a rank: a mean of more is no other
SHOWN = 10  # calls
SYNC_BATCHNORM = "SyncBatchNorm"  # so its collectives are called in events, whoever calls them


@dataclass(frozen=True)
class Overlap:
    """A step's communication, as far as is known when buckets were under way; microseconds, means."""

    buckets: int  # how many there are
    size: int  # bytes of all of them
    in_flight: float  # at least one was under way
    hidden: float  # of that, while the rank computed

    @property
    def part(self) -> float | None:
        """What share was hidden; None where nobody says when buckets were done."""
        return self.hidden / self.in_flight if self.in_flight else None


@dataclass(frozen=True)
class Collective:
    operation: str  # such as "all_reduce"
    where: str  # "file:line"
    seconds: float  # of a step, the mean of the ranks
    least: float  # likewise, the rank that waits least in it: what is no waiting for others


def overlap(logs: Sequence[RankLog]) -> Overlap | None:
    """Returns what the buckets tell; None where there are none."""
    lines = [line for log in logs for line in _some_of(log) if line["buckets"] and not line["more"]]
    if not lines:
        return None
    seen = [(intervals, line) for line in lines if (intervals := in_flight(line))]
    whole = sum(end - begin for intervals, _ in seen for begin, end in intervals)
    open_to_see = sum(
        max(0.0, min(end, since + length) - max(begin, since))
        for intervals, line in seen
        for name, since, length, *_ in line["spans"]
        if name in WAITS
        for begin, end in intervals
    )
    count = max(1, len(seen))
    size = sum(measured(bucket[1] or 0) for bucket in lines[-1]["buckets"])
    return Overlap(len(lines[-1]["buckets"]), int(size), whole / count, (whole - open_to_see) / count)


def in_flight(line: Event) -> list[tuple[float, float]]:
    """Returns when at least one bucket of a line was under way, in intervals that do not touch."""
    known = sorted((begun, done) for *_, begun, done in line["buckets"] if begun is not None and done is not None)
    merged: list[tuple[float, float]] = []
    for begin, end in known:
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        elif end > begin:
            merged.append((begin, end))
    return merged


def calls(logs: Sequence[RankLog]) -> list[Collective]:
    """Returns the collectives that the script calls in its steps, the dearest first; never those of the first step."""
    by_rank = []
    for log in logs:
        lines = [line for line in _some_of(log) if line["step"] > log.steps[0]["step"]]
        spent: dict[tuple[str, str], float] = defaultdict(float)
        for name, _, length, *call in chain.from_iterable(line["spans"] for line in lines):
            if name == "collective" and len(call) == 2:
                spent[str(call[0]), str(call[1])] += measured(length)
        by_rank.append({call: micros / len(lines) / 1e6 for call, micros in spent.items()})
    every = {call for each in by_rank for call in each}
    spent_by_call = [(call, [spent.get(call, 0.0) for spent in by_rank]) for call in every]
    found = [Collective(*call, fmean(spent), min(spent)) for call, spent in spent_by_call]
    return sorted(found, key=lambda each: (-each.seconds, each.where))[:SHOWN]


def _some_of(log: RankLog) -> list[Event]:
    lines = list(valid_steps(log.steps).values())
    return lines[:: max(1, -(-len(lines) // LOOKED_AT))]
