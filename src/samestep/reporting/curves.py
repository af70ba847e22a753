"""Curves of a run, short enough for a page: steps in ranges, of each the mean and what it ranges over.

    10,000 steps of 8 ranks      ─▶   500 ranges: mean, lowest and highest of all steps and ranks in it

A mean alone would hide the one step that exploded; a number that is none is counted and told, not drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from samestep.reporting.record import RankLog
from samestep.reporting.summary import number_of
from samestep.reporting.table import TRAINING, Floats, Ints, Table

__all__: list[str] = []

MOST_RANGES = 500
MOST_CURVES = 48
STACKED = 200  # ranges of the phases


@dataclass(frozen=True)
class Curve:
    """A logged value over the steps.

    Attributes:
        name: of it.
        steps: the last of each range.
        means, lowest, highest: of it.
        ranks: that have logged it.
        attempt: of the run.
        odd: steps at which it was no number, the first ones; how many there were is `odd_count`.
    """

    name: str
    steps: list[int]
    means: list[float]
    lowest: list[float]
    highest: list[float]
    ranks: int
    attempt: int
    odd: list[int]
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
    """How a step's time changes over the run.

    Attributes:
        steps: the last of each range.
        phases: seconds of a step by phase, the mean of the ranks and of the range's steps.
        slowest: the longest step of each range.
    """

    steps: list[int]
    phases: dict[str, list[float]]
    slowest: list[float]


def course(table: Table) -> Course:
    """Returns the course of all steps but the first."""
    steady = table.steady
    edges = ranges(len(steady), STACKED)
    if len(edges) < 2 or not steady.ranks:
        return Course([], {}, [])
    phases = {name: _means(steady.of_phases(name).mean(axis=0), steady.counts, edges) for name in TRAINING}
    slowest = np.maximum.reduceat(steady.trained.mean(axis=0), edges[:-1])
    found = {name: means.tolist() for name, means in phases.items() if means.any()}
    return Course(ends(steady, edges), found, slowest.tolist())


def ends(table: Table, edges: Sequence[int]) -> list[int]:
    """Returns the last step of each range."""
    return [int(table.steps[edge - 1]) for edge in edges[1:]]


def _means(values: Floats, counts: Ints, edges: Sequence[int]) -> Floats:
    begins: Any = edges[:-1]
    found: Floats = np.add.reduceat(values * counts, begins) / np.add.reduceat(counts, begins)
    return found
