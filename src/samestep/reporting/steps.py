"""What a run's steps took: seconds by rank, step and phase; where the time of a run went; which rank is slow.

               step 1         step 2         …               busy   = data, forward, backward, optimizer, other
    rank 0     busy │ waits   busy │ waits   …               waits  = wait, collective
    rank 1     busy ── │ w    busy ── │ w    …               apart  = evaluate, save, load: no training

The ranks of a step leave it together, so a slow rank is seen by its busy time, and by how little it waits. The rank
that comes last to a collective waits for messages only: the least that any rank waits in a step is `transfer`, what the
others wait beyond it is `delay`. Beyond the 10,000th step one column stands for several steps; numbers are seconds of
one step all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samestep.events import NON_TRAINING, PHASES
from samestep.reporting.run_log import Event, RankLog, last, measured

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

WAITS = ("wait", "collective")
TRAINING = tuple(name for name in PHASES if name not in NON_TRAINING)
OWN = tuple(name for name in TRAINING if name not in WAITS)
_LATEST = 1 << 53  # steps; more is no count


@dataclass(frozen=True)
class StepTable:
    """A run's steps; `left_out` are ranks that have too few to be compared, and how many they have."""

    ranks: tuple[int, ...]  # by row
    steps: Ints  # by column, the last step that it stands for
    counts: Ints  # by column, how many steps those are
    spent: Floats  # (row, column, phase): seconds of a step
    left_out: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, logs: Sequence[RankLog]) -> StepTable:
        """Returns the table of the ranks of an attempt; a rank that has less than half of the steps is left out."""
        lines = {log.rank: valid_steps(log.steps) for log in logs}
        taken = {rank: sum(line["steps"] for line in each.values()) for rank, each in lines.items()}
        most = max(taken.values(), default=0)
        full = {rank: each for rank, each in lines.items() if each and 2 * taken[rank] >= most}
        common = sorted(set.intersection(*(set(each) for each in full.values()))) if full else []
        rows = [[_seconds(full[rank][step]) for step in common] for rank in full]
        return cls(
            ranks=tuple(full),
            steps=np.array(common, dtype=np.int64),
            counts=np.array([next(iter(full.values()))[step]["steps"] for step in common], dtype=np.int64),
            spent=np.array(rows, dtype=np.float64).reshape(len(full), len(common), len(PHASES)),
            left_out={rank: taken[rank] for rank in lines if rank not in full},
        )

    def __len__(self) -> int:
        return len(self.steps)

    def columns(self, chosen: slice | NDArray[Any]) -> StepTable:
        return replace(self, steps=self.steps[chosen], counts=self.counts[chosen], spent=self.spent[:, chosen])

    @cached_property
    def steady(self) -> StepTable:
        """The table without the first step, which builds the model and warms up; of one step, itself."""
        return self.columns(slice(1, None)) if len(self) > 1 else self

    @cached_property
    def own(self) -> Floats:
        """(row, column): what a rank does by itself."""
        return self.of_phases(*OWN)

    @cached_property
    def waits(self) -> Floats:
        """(row, column): what it stands in collectives, for others or for their messages."""
        return self.of_phases(*WAITS)

    @cached_property
    def trained(self) -> Floats:
        """(row, column): both."""
        return self.own + self.waits

    def of_phases(self, *names: str) -> Floats:
        """(row, column): the seconds of phases together."""
        total: Floats = self.spent[:, :, [PHASES.index(name) for name in names]].sum(axis=2)
        return total

    def sum(self, values: Floats) -> float:
        """Returns the seconds over all steps, the mean of the ranks; `values` are (row, column) or (column)."""
        if not values.size:
            return 0.0
        by_column = values.mean(axis=0) if values.ndim == 2 else values
        return float((by_column * self.counts).sum())

    @cached_property
    def total(self) -> float:
        """Seconds of training, the mean of the ranks."""
        return self.sum(self.trained)

    def mean(self, values: Floats) -> float:
        """Returns the seconds of a step."""
        return self.sum(values) / max(1, int(self.counts.sum()))

    def part(self, values: Floats) -> float:
        """Returns what share of the training some seconds are."""
        return self.sum(values) / self.total if self.total else 0.0

    def by_rank(self, values: Floats) -> Floats:
        """Returns the seconds of a step, by row."""
        mean: Floats = (values * self.counts).sum(axis=1) / max(1, int(self.counts.sum()))
        return mean


def valid_steps(lines: Sequence[Event]) -> dict[int, Event]:
    """Returns lines that stand for steps, by the last of these; of two of one step the later counts."""
    return {line["step"]: line for line in lines if 0 < line["step"] < _LATEST and 0 < line["steps"] < _LATEST}


def _seconds(line: Event) -> list[float]:
    """Returns the seconds of one step by phase; what belongs to none is "other"."""
    spent = [measured(line["spent"].get(name, 0.0)) for name in PHASES]
    spent[PHASES.index("other")] += max(0.0, measured(line["seconds"]) - sum(spent))
    return [value / line["steps"] for value in spent]


@dataclass(frozen=True)
class TimeBreakdown:
    """Seconds."""

    wall: float  # from begin to end
    training: float  # all steps
    first: float  # the first step
    outside_training: dict[str, float]  # "evaluate", "save" and "load", where there were any
    step: float  # a step after the first, in the mean
    median: float  # likewise
    slowest: float  # likewise, the longest
    slowest_step: int  # which that is
    phases: dict[str, float]  # a step after the first, by phase
    transfer: float  # of its waiting, what no rank was spared
    delay: float  # the rest of it, which is for other ranks

    @property
    def rest(self) -> float:
        """Neither training nor apart: imports, loading, what the script does between and behind its steps."""
        return max(0.0, self.wall - self.training - sum(self.outside_training.values()))

    @property
    def waits(self) -> float:
        """Of a step."""
        return self.transfer + self.delay

    def part(self, seconds: float) -> float:
        """Returns what share of a step some seconds are."""
        return seconds / self.step if self.step else 0.0

    def of_run(self, seconds: float) -> float:
        """Returns what share of the run some seconds are."""
        return min(1.0, seconds / self.wall) if self.wall else 0.0


def account(table: StepTable, logs: Sequence[RankLog], ended: float | None = None) -> TimeBreakdown:
    """Returns where the time of an attempt has gone; `ended` is when its launcher ended, if it is known."""
    steady = table.steady
    trained = steady.trained.mean(axis=0) if len(steady) else np.zeros(1)
    least = steady.waits.min(axis=0) if len(steady) else np.zeros(1)
    waits, transfer = steady.mean(steady.waits), steady.mean(least) if len(steady) else 0.0
    return TimeBreakdown(
        wall=wall(logs, ended),
        training=table.total,
        first=float(table.trained[:, 0].mean()) if len(table) else 0.0,
        outside_training=_outside_training(logs),
        step=steady.mean(steady.trained),
        median=_median(trained, steady),
        slowest=float(trained.max()),
        slowest_step=int(steady.steps[trained.argmax()]) if len(steady) else 0,
        phases={name: found for name in TRAINING if (found := steady.mean(steady.of_phases(name)))},
        transfer=transfer,
        delay=max(0.0, waits - transfer),
    )


def wall(logs: Sequence[RankLog], ended: float | None = None) -> float:
    """Returns the seconds from the first rank's begin to its launcher's end, or the last sign of life of any rank."""
    begins = [log.begin["t"] - log.clock_offset for log in logs if log.begin]
    ends = [last(log) - log.clock_offset for log in logs] + ([] if ended is None else [ended])
    begins += [log.steps[0]["t"] - log.clock_offset for log in logs if log.steps and not log.begin]
    return measured(max(ends) - min(begins)) if begins and ends else 0.0


def _outside_training(logs: Sequence[RankLog]) -> dict[str, float]:
    sums = {
        name: fmean(sum(measured(line["spent"].get(name, 0.0)) for line in log.steps) for log in logs)
        for name in (NON_TRAINING if logs else ())
    }
    return {name: seconds for name, seconds in sums.items() if seconds}


def _median(values: Floats, table: StepTable) -> float:
    """The middle one of all steps, not of the columns."""
    if not len(table):
        return 0.0
    order = values.argsort()
    passed = table.counts[order].cumsum()
    return float(values[order][np.searchsorted(passed, passed[-1] / 2)])


FEWEST = 15  # steps of which it can be said
OFTEN, CLEARLY = 0.25, 1.05  # in so many of them, by so much


@dataclass(frozen=True)
class Straggler:
    """The rank that holds the others up most."""

    rank: int
    own: float  # its own seconds of a step
    others: float  # the median of the others'
    phase: str  # in which it loses most
    gain: float  # seconds that every step would be shorter, if it kept up


@dataclass(frozen=True)
class RankTimes:
    table: StepTable  # of the steps

    @cached_property
    def own(self) -> Floats:
        """By row, the own seconds of a step."""
        return self.table.by_rank(self.table.own)

    @cached_property
    def relative(self) -> Floats:
        """By row, how much more than the median of the other ranks that is: 0.1 is a tenth more."""
        return _beyond(self.own[:, np.newaxis])[:, 0]

    def over(self, edges: list[int]) -> Floats:
        """(row, range): the same in ranges of columns; `edges` are their begins, and the end."""
        counts = np.add.reduceat(self.table.counts, edges[:-1])
        return _beyond(np.add.reduceat(self.table.own * self.table.counts, edges[:-1], axis=1) / counts)

    @cached_property
    def straggler(self) -> Straggler | None:
        """The rank that would bring the most if it kept up; None of one rank, or where none stands out."""
        if len(self.table.ranks) < 2 or not len(self.table):
            return None
        return max((self._blamed(row) for row in range(len(self.table.ranks))), key=lambda each: each.gain)

    def _blamed(self, row: int) -> Straggler:
        others = np.delete(self.table.own, row, axis=0)
        without = self.table.mean(np.maximum(self.table.own[row] - others.max(axis=0), 0.0))
        means = np.delete(self.own, row)
        beyond = float(self.own[row] - np.median(means))
        often = self.table.mean((self.table.own[row] > CLEARLY * others.max(axis=0)).astype(float))
        known = self.table.counts.sum() >= FEWEST and often >= OFTEN
        gain = max(0.0, min(without, beyond)) if known else 0.0
        return Straggler(self.table.ranks[row], float(self.own[row]), float(np.median(means)), self._phase(row), gain)

    def _phase(self, row: int) -> str:
        def lost(name: str) -> float:
            spent = self.table.by_rank(self.table.of_phases(name))
            return float(spent[row] - np.median(np.delete(spent, row)))

        return max(OWN, key=lost)


def _beyond(own: Floats) -> Floats:
    """How much more each row has than the median of the others, the lower of two: one slow rank makes nobody quick."""
    rows = len(own)
    if rows < 2:
        return np.zeros_like(own)
    ordered, places = np.sort(own, axis=0), np.argsort(np.argsort(own, axis=0), axis=0)
    middle = (rows - 2) // 2
    others = np.where(places > middle, ordered[middle], ordered[middle + 1])
    found: Floats = np.divide(own, others, out=np.ones_like(own), where=others > 0) - 1
    return found
