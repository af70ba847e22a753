"""What a page draws of a run: chosen steps rank by rank, steps of a pipeline, and curves over all steps.

    10,000 steps of 8 ranks      ─▶   500 ranges: mean, lowest and highest of all steps and ranks in it

A mean alone would hide the one step that exploded; a number that is none is counted and told, not drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from samestep.reporting.run_log import Event, RankLog, measured, number_of
from samestep.reporting.steps import TRAINING, StepTable, valid_steps

SLOWEST, BETWEEN = 5, 11  # how many of them
MOST_RANKS = 64  # that are drawn
MOST_BUCKETS = 64  # of a rank


class RankTimeline(NamedTuple):
    """A rank in a step; times are microseconds from the begin of the rank that began first."""

    rank: int
    spans: list[tuple[str, float, float, str]]  # phase, begin, length, and a collective's name and place
    # number, bytes, ready, begun, done; None where nobody says
    buckets: list[tuple[int, int, float | None, float | None, float | None]]
    more: int  # spans that were left out


@dataclass(frozen=True)
class StepTimeline:
    step: int
    why: str  # it was chosen
    seconds: float  # of training in it, the mean of the ranks
    lanes: list[RankTimeline]  # by rank


def moments(table: StepTable, logs: Sequence[RankLog]) -> list[StepTimeline]:
    """Returns the chosen steps in their order; fewer where there are fewer."""
    if not len(table):
        return []
    drawn = _drawn(table, logs)
    lines = {log.rank: valid_steps(log.steps) for log in drawn}
    return [
        StepTimeline(
            step=int(table.steps[column]),
            why=why,
            seconds=float(table.trained[:, column].mean()),
            lanes=list(_lanes(int(table.steps[column]), drawn, lines)),
        )
        for column, why in sorted(chosen(table).items())
    ]


def chosen(table: StepTable) -> dict[int, str]:
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


def _drawn(table: StepTable, logs: Sequence[RankLog]) -> list[RankLog]:
    """All ranks, or the slowest and the fastest ones."""
    own = dict(zip(table.ranks, table.by_rank(table.own).tolist(), strict=True))
    known = sorted((log for log in logs if log.rank in own), key=lambda log: -own[log.rank])
    some = known if len(known) <= MOST_RANKS else known[: MOST_RANKS // 2] + known[-MOST_RANKS // 2 :]
    return sorted(some, key=lambda log: log.rank)


def _lanes(step: int, logs: Sequence[RankLog], lines: dict[int, dict[int, Event]]) -> Iterator[RankTimeline]:
    begins = {log.rank: began(lines[log.rank][step]) - log.clock_offset for log in logs}
    zero = min(begins.values())
    for log in logs:
        line, shift = lines[log.rank][step], 1e6 * measured(begins[log.rank] - zero)
        spans = [
            (str(name), round(measured(begin) + shift, 1), measured(length), " at ".join(map(str, call[:2])))
            for name, begin, length, *call in line["spans"]
        ]
        yield RankTimeline(
            log.rank, spans, [_bucket(each, shift) for each in line["buckets"][:MOST_BUCKETS]], line["more"]
        )


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


MOST = 12  # steps that are drawn
MOST_ACTIONS = 2_000  # of a rank in a step
_LONGEST = 1e9  # seconds; more is no measurement


@dataclass(frozen=True)
class Box:
    """An action: its kind ("F", "B", "I", "W"), stage, micro-batch, and seconds from the step's begin."""

    rank: int
    kind: str
    stage: int
    micro_batch: int
    begin: float
    end: float


@dataclass(frozen=True)
class Gantt:
    step: int
    schedule: str
    stages: int
    ranks: tuple[int, ...]
    boxes: tuple[Box, ...]

    @property
    def seconds(self) -> float:
        return max(box.end for box in self.boxes) - min(box.begin for box in self.boxes)

    @property
    def idle(self) -> float:
        """What share of the ranks' time they had nothing to do."""
        worked = sum(box.end - box.begin for box in self.boxes)
        whole = len(self.ranks) * self.seconds
        return max(0.0, 1 - worked / whole) if whole else 0.0

    @property
    def micro_batches(self) -> int:
        return len({box.micro_batch for box in self.boxes})


def gantts(logs: Sequence[RankLog]) -> list[Gantt]:
    """Returns the steps that all ranks with a stage have noted: the first ones, the last, and some between."""
    staged = [log for log in logs if log.pipelines]
    if not staged:
        return []
    lines = {log.rank: {line["step"]: line for line in log.pipelines if line["actions"]} for log in staged}
    common = sorted(set.intersection(*(set(each) for each in lines.values())))
    chosen = common if len(common) <= MOST else common[:3] + common[3 :: -(-(len(common) - 3) // (MOST - 4))]
    if common and common[-1] not in chosen:
        chosen.append(common[-1])
    return [_gantt(step, staged, lines) for step in chosen]


def idle(steps: Sequence[Gantt]) -> float:
    """Returns the share of the ranks' time without work, without the first step where there are more."""
    return fmean(step.idle for step in steps[1:] or steps)


def _gantt(step: int, logs: Sequence[RankLog], lines: dict[int, dict[int, Event]]) -> Gantt:
    events = [(log, lines[log.rank][step]) for log in logs]
    zero = min(line["t"] - log.clock_offset for log, line in events)
    boxes = [
        Box(log.rank, kind, int(stage), int(micro), begin + shift, max(begin, end) + shift)
        for log, line in events
        for shift in [measured(line["t"] - log.clock_offset - zero)]
        for kind, stage, micro, begin, end in line["actions"][:MOST_ACTIONS]
        if abs(stage) + abs(micro) + abs(begin) + abs(end) < _LONGEST
    ]
    _, first = events[0]
    ranks = tuple(log.rank for log in logs)
    boxes = boxes or [Box(ranks[0], "F", 0, 0, 0.0, 0.0)]
    return Gantt(step, first["schedule"], first["stages"], ranks, tuple(boxes))


MOST_RANGES = 500
MOST_CURVES = 48
STACKED = 200  # ranges of the phases


@dataclass(frozen=True)
class Curve:
    """A logged value over the steps."""

    name: str
    steps: list[int]  # the last of each range
    means: list[float]
    lowest: list[float]
    highest: list[float]
    ranks: int  # that have logged it
    attempt: int  # of the run
    odd: list[int]  # steps at which it was no number, the first ones; how many there were is `odd_count`
    odd_count: int


def curves(logs: Sequence[RankLog]) -> list[Curve]:
    """Returns the values that the ranks have logged, in the order of their first appearance."""
    points: dict[str, dict[int, list[float]]] = {}
    ranks: dict[str, set[int]] = {}
    for log in logs:
        for line in log.values:
            for name, value in line["values"].items():
                points.setdefault(name, {}).setdefault(line["step"], []).append(number_of(value))
                ranks.setdefault(name, set()).add(log.rank)
    attempt = logs[0].attempt if logs else 0
    return [_curve(name, points[name], len(ranks[name]), attempt) for name in list(points)[:MOST_CURVES]]


def _curve(name: str, points: dict[int, list[float]], ranks: int, attempt: int) -> Curve:
    finite = {step: found for step, each in points.items() if (found := [one for one in each if math.isfinite(one)])}
    odd = sorted(step for step, each in points.items() if not all(map(math.isfinite, each)))
    steps = sorted(finite)
    edges = ranges(len(steps), MOST_RANGES)
    parts = [[value for step in steps[a:b] for value in finite[step]] for a, b in pairwise(edges)]
    return Curve(
        name=name,
        steps=[steps[edge - 1] for edge in edges[1:]],
        means=[math.fsum(part) / len(part) for part in parts],
        lowest=[min(part) for part in parts],
        highest=[max(part) for part in parts],
        ranks=ranks,
        attempt=attempt,
        odd=odd[:MOST_RANGES],
        odd_count=len(odd),
    )


def ranges(count: int, most: int) -> list[int]:
    """Returns the edges of at most so many ranges, of as equal a length as can be.

    >>> ranges(10, 4), ranges(3, 4), ranges(0, 4)
    ([0, 2, 5, 7, 10], [0, 1, 2, 3], [0])
    """
    parts = min(count, most)
    return [count * part // parts for part in range(parts + 1)] if parts else [0]


@dataclass(frozen=True)
class Course:
    """How a step's time changes over the run."""

    steps: list[int]  # the last of each range
    phases: dict[str, list[float]]  # seconds of a step by phase, the mean of the ranks and of the range's steps
    slowest: list[float]  # the longest step of each range


def course(table: StepTable) -> Course:
    steady = table.steady
    edges = ranges(len(steady), STACKED)
    if len(edges) < 2 or not steady.ranks:
        return Course([], {}, [])
    begins: Any = edges[:-1]
    counts = np.add.reduceat(steady.counts, begins)
    sums = {name: steady.of_phases(name).mean(axis=0) * steady.counts for name in TRAINING}
    phases = {name: np.add.reduceat(seconds, begins) / counts for name, seconds in sums.items()}
    slowest = np.maximum.reduceat(steady.trained.mean(axis=0), begins)
    found = {name: means.tolist() for name, means in phases.items() if means.any()}
    return Course(ends(steady, edges), found, slowest.tolist())


def ends(table: StepTable, edges: Sequence[int]) -> list[int]:
    return [int(table.steps[edge - 1]) for edge in edges[1:]]
