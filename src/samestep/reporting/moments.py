"""A choice of steps, each drawn rank by rank: what every rank did when, and when its buckets travelled.

rank 0   data │ forward │ backward ─────│ wait ───│ optimizer        first, last, median and slowest steps,
  buckets               ├── 0 ──┤├──── 1 ────────┤                 and some between them
rank 1   data │ forward ─────── │ backward ─│ wait│ optimizer
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from samestep.reporting.record import Event, RankLog
from samestep.reporting.table import Table, measured, sound

__all__: list[str] = []

SLOWEST, BETWEEN = 5, 11  # how many of them
MOST_RANKS = 64  # that are drawn
MOST_BUCKETS = 64  # of a rank


@dataclass(frozen=True)
class Lane:
    """A rank in a step; times are microseconds from the begin of the rank that began first.

    Attributes:
        rank: which.
        spans: (phase, begin, length, label); the label is a collective's name and place.
        buckets: (number, bytes, ready, begun, done), None where nobody says.
        more: spans that were left out.
    """

    rank: int
    spans: list[tuple[str, float, float, str]]
    buckets: list[tuple[int, int, float | None, float | None, float | None]]
    more: int


@dataclass(frozen=True)
class Moment:
    """A step.

    Attributes:
        step: which.
        why: it was chosen.
        seconds: of training in it, the mean of the ranks.
        lanes: by rank.
    """

    step: int
    why: str
    seconds: float
    lanes: list[Lane]


def moments(table: Table, logs: Sequence[RankLog]) -> list[Moment]:
    """Returns the chosen steps in their order; fewer where there are fewer."""
    if not len(table):
        return []
    drawn = _drawn(table, logs)
    lines = {log.rank: sound(log.steps) for log in drawn}
    return [
        Moment(
            step=int(table.steps[column]),
            why=why,
            seconds=float(table.trained[:, column].mean()),
            lanes=list(_lanes(int(table.steps[column]), drawn, lines)),
        )
        for column, why in sorted(chosen(table).items())
    ]


def chosen(table: Table) -> dict[int, str]:
    """Returns columns of a table and why they are worth a look."""
    trained = table.trained.mean(axis=0)
    order = trained[1:].argsort() + 1 if len(table) > 1 else np.zeros(1, dtype=np.int64)
    found = {0: "the first step", len(table) - 1: "the last step"} if len(table) > 1 else {0: "the only step"}
    found.setdefault(int(order[len(order) // 2]), "the median step")
    found.setdefault(int(order[0]), "the fastest step")
    for place, column in enumerate(reversed(order[-SLOWEST:].tolist()), 1):
        found.setdefault(column, "the slowest step" if place == 1 else f"number {place} of the slowest")
    for column in np.linspace(1, max(1, len(table) - 2), BETWEEN).round().astype(int).tolist():
        if column < len(table):
            found.setdefault(column, "one between")
    return found


def _drawn(table: Table, logs: Sequence[RankLog]) -> list[RankLog]:
    """All ranks, or the slowest and the fastest ones."""
    own = dict(zip(table.ranks, table.by_rank(table.own).tolist(), strict=True))
    known = sorted((log for log in logs if log.rank in own), key=lambda log: -own[log.rank])
    some = known if len(known) <= MOST_RANKS else known[: MOST_RANKS // 2] + known[-MOST_RANKS // 2 :]
    return sorted(some, key=lambda log: log.rank)


def _lanes(step: int, logs: Sequence[RankLog], lines: dict[int, dict[int, Event]]) -> Iterator[Lane]:
    begins = {log.rank: began(lines[log.rank][step]) - log.ahead for log in logs}
    zero = min(begins.values())
    for log in logs:
        line, shift = lines[log.rank][step], 1e6 * measured(begins[log.rank] - zero)
        spans = [
            (str(name), round(measured(begin) + shift, 1), measured(length), " at ".join(map(str, call[:2])))
            for name, begin, length, *call in line["spans"]
        ]
        yield Lane(log.rank, spans, [_bucket(each, shift) for each in line["buckets"][:MOST_BUCKETS]], line["more"])


def _bucket(bucket: Sequence[float | None], shift: float) -> tuple[int, int, float | None, float | None, float | None]:
    number, size, *times = bucket
    ready, begun, done = (None if time is None else round(measured(time) + shift, 1) for time in times)
    return int(measured(number or 0)), int(measured(size or 0)), ready, begun, done


def began(line: Event) -> float:
    """Returns when the last step of a line began: its pieces are of that step, and end where the line does."""
    if line["steps"] <= 1 or not line["spans"]:
        return float(line["t"])
    _, begin, length, *_ = line["spans"][-1]
    return float(line["t"]) + max(0.0, measured(line["seconds"]) - (measured(begin) + measured(length)) / 1e6)
