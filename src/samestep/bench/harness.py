"""Timing in alternating pairs, and what may be said of the result.

Times taken one after the other drift: clocks throttle, caches warm, other processes come and go. So a pair of blocks
is timed side by side, again and again, with the first place changing hands:

    pair          0                1                2                3
    runs     ours theirs      theirs ours      ours theirs      theirs ours      ...
    ratio    ours / theirs    of each pair: drift that is slow beside a pair cancels, and going first favours nobody

The median of the ratios is the answer: a stolen time slice spoils one pair and hardly moves it. How far it may be off
is read from the ratios themselves, in order: each lies below the true median as a coin shows heads, whatever the
distribution, so as many may be left out at both ends as keep it between the rest with 95 % confidence. Source: T.
Kalibera and R. Jones, "Rigorous Benchmarking in Reasonable Time", ISMM 2013.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from statistics import median, quantiles
from typing import Any, TypeVar

from samestep.errors import UsageError
from samestep.launch.resources import visible_gpus

Block = Callable[[], object]
Measure = Callable[[], float]
T = TypeVar("T")

FEWEST = 6  # pairs: of 5, all lie on one side of the median once in 16 times
DRAWN = ("allreduce",)  # benchmarks that --plot draws


@dataclass(frozen=True)
class Options:
    ranks: int = 2  # processes on this machine
    repeats: int = 150  # pairs of blocks

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise UsageError(f"a benchmark needs 1 rank or more, got {self.ranks}")
        if self.repeats < 2:
            raise UsageError(f"a benchmark needs 2 repeats or more, for quartiles, got {self.repeats}")


@dataclass(frozen=True)
class Comparison:
    """Times of pairs of blocks, in seconds a unit of work; `ours[i]` and `theirs[i]` were taken side by side."""

    name: str  # what was compared with what
    unit: str  # the work that one time is for, such as "step"
    ours: Sequence[float]
    theirs: Sequence[float]
    most: float | None = None  # the target: the largest ratio; None without one
    figures: dict[str, float] = field(default_factory=dict)  # what else was found out, by name

    @property
    def ratios(self) -> list[float]:
        """Ours over theirs, pair by pair; below 1 ours is faster."""
        return [ours / theirs for ours, theirs in zip(self.ours, self.theirs, strict=True)]

    @property
    def ratio(self) -> float:
        return median(self.ratios)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Between these two lies the middle half of the ratios."""
        lower, _, upper = quantiles(self.ratios, n=4, method="inclusive")
        return lower, upper

    @property
    def is_enough(self) -> bool:
        """Whether there are pairs enough for `interval` to hold what it says."""
        return len(self.ours) >= FEWEST

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the median ratio; of fewer than 6 pairs it holds less often."""
        ordered = sorted(self.ratios)
        lower = interval_rank(len(ordered))
        return ordered[lower], ordered[len(ordered) - 1 - lower]

    @property
    def kept(self) -> bool | None:
        """Whether the target is met; None without a target, or where too few pairs cannot tell."""
        lower, upper = self.interval
        if self.most is None or not self.is_enough or lower <= self.most < upper:
            return None
        return upper <= self.most

    def as_json(self) -> dict[str, Any]:
        """Everything above, and every single time."""
        return {
            "name": self.name,
            "unit": f"seconds per {self.unit}",
            "ours": {"median": median(self.ours), "times": list(self.ours)},
            "theirs": {"median": median(self.theirs), "times": list(self.theirs)},
            "ratio": {"median": self.ratio, "interval": list(self.interval), "quartiles": list(self.quartiles)},
            "overhead_percent": 100 * (self.ratio - 1),
            "target_percent": None if self.most is None else 100 * (self.most - 1),
            "kept": self.kept,
            **self.figures,
        }


def interval_rank(count: int) -> int:
    """Returns how many of so many values may be left out at either end, with the median between the rest all the same.

    It is not in 1 of 20 cases, where no more values than that lie on one side of it.

    >>> [interval_rank(count) for count in (6, 8, 9, 100)]
    [0, 0, 1, 39]
    """
    below, number = 1, 0  # of 2 ** count outcomes, those in which at most `number` values lie below the median
    while 40 * (below + math.comb(count, number + 1)) <= 2**count:
        number += 1
        below += math.comb(count, number)
    return number


@dataclass(frozen=True)
class Report:
    bench: str
    comparisons: Sequence[Comparison]
    setting: dict[str, Any] = field(default_factory=dict)
    rows: tuple[str, ...] = ()  # figures to show beside the times, where each comparison is to be one row of a table
    # by name, (bytes, GB/s) of what the plot shows
    curves: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    conclusion: str = ""  # what follows, where there is more to say than whether targets are met
    legend: str = ""  # what the columns are, for people
    file: str = ""  # a text that --write keeps

    def as_json(self) -> dict[str, Any]:
        comparisons = [comparison.as_json() for comparison in self.comparisons]
        return {"bench": self.bench, "setting": self.setting, "comparisons": comparisons} | (
            {"conclusion": self.conclusion} if self.conclusion else {}
        )


def training_device(ranks: int) -> str | None:
    """Returns where so many ranks train: None for a GPU each, if there are enough, else "cpu"."""
    return None if visible_gpus() >= ranks else "cpu"


def in_sets(
    repeats: int, most: int, measure: Callable[[int, bool], tuple[Sequence[Sequence[float]], T]]
) -> tuple[list[tuple[float, ...]], list[T]]:
    """Measures so many pairs in several sets of processes, at most `most`; returns the times of each side together.

    `measure` gets how many pairs its set takes, and whether ours goes first; what it returns beside the times is
    returned for each set.

    >>> in_sets(10, 4, lambda pairs, ours_first: ([[pairs], [ours_first]], None))[0]
    [(2, 2, 3, 3), (True, False, True, False)]
    """
    sets = min(most, repeats)
    found = [measure((repeats + number) // sets, number % 2 == 0) for number in range(sets)]
    sides = zip(*(times for times, _ in found), strict=True)
    return [tuple(chain(*side)) for side in sides], [more for _, more in found]


def alternate(
    *blocks: Block,
    pairs: int,
    warmup: int = 2,
    align: Block = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[list[float], ...]:
    """Times blocks in turn, two of them in alternating pairs; returns the seconds of each, pair by pair.

    All run `warmup` times untimed before. `align` waits until all ranks (and devices) are here; it runs before and
    after each block, inside the time after. Collective where the blocks or `align` are: every rank must call it.
    """
    for _ in range(warmup):
        for block in blocks:
            block()

    def timed(block: Block) -> float:
        align()
        start = clock()
        block()
        align()
        return clock() - start

    return interleave(*(functools.partial(timed, block) for block in blocks), pairs=pairs)


def interleave(*measures: Measure, pairs: int, warmup: int = 0) -> tuple[list[float], ...]:
    """Calls functions that time themselves in turn, another one first each time; returns the seconds of each."""
    for _ in range(warmup):
        for measure in measures:
            measure()
    times: list[list[float]] = [[] for _ in measures]
    for pair in range(pairs):
        for turn in range(len(measures)):
            place = (pair + turn) % len(measures)
            times[place].append(measures[place]())
    return tuple(times)


def check_plot(name: str) -> None:
    """Refuses a plot before anything is measured."""
    if name not in DRAWN:
        raise UsageError(f"--plot draws {', '.join(DRAWN)}, not {name}: --json has every time of it")
    if find_spec("plotly") is None:
        raise UsageError("--plot needs plotly: pip install 'samestep[report]'")


def draw(report: Report, file: Path) -> None:
    """Writes bandwidth against size, as a page that needs no network."""
    from plotly import graph_objects

    figure = graph_objects.Figure()
    for name, points in report.curves.items():
        figure.add_scatter(name=name, x=[nbytes for nbytes, _ in points], y=[speed for _, speed in points])
    conditions = ", ".join(f"{name} {value}".replace("_", " ") for name, value in report.setting.items())
    figure.update_layout(
        title=f"{report.bench}: {conditions}",
        xaxis={"title": "bytes of a rank's tensor", "type": "log", "exponentformat": "SI", "dtick": 1},
        yaxis={"title": "bus bandwidth, GB/s", "type": "log", "dtick": 1, "exponentformat": "none"},
        template="plotly_white",
    )
    figure.write_html(file, include_plotlyjs=True)
