"""What a run's time was spent on, from its first rank's begin to its last one's end; the mean of the ranks.

    wall      first step │ steps ················ │ evaluate │ save │ load │ rest        rest: before, between, behind
    a step    data │ forward │ backward │ wait, collective │ optimizer │ other
                                          transfer │ delay

The rank that comes last to a meeting waits for messages only: the least that any rank waits in a step is `transfer`;
what the others wait beyond it, they wait for that rank: `delay`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from samestep.events import NON_TRAINING
from samestep.reporting.record import RankLog
from samestep.reporting.table import TRAINING, Floats, Table, measured

__all__: list[str] = []


@dataclass(frozen=True)
class Account:
    """Seconds.

    Attributes:
        wall: from begin to end.
        training: all steps.
        first: the first step.
        apart: "evaluate", "save" and "load", where there were any.
        step: a step after the first, in the mean.
        usual: likewise, the median.
        slowest: likewise, the longest.
        slowest_step: which that is.
        phases: a step after the first, by phase.
        transfer: of its waiting, what no rank was spared.
        delay: the rest of it, which is for other ranks.
    """

    wall: float
    training: float
    first: float
    apart: dict[str, float]
    step: float
    usual: float
    slowest: float
    slowest_step: int
    phases: dict[str, float]
    transfer: float
    delay: float

    @property
    def rest(self) -> float:
        """Neither training nor apart: imports, loading, what the script does between and behind its steps."""
        return max(0.0, self.wall - self.training - sum(self.apart.values()))

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


def account(table: Table, logs: Sequence[RankLog], ended: float | None = None) -> Account:
    """Returns where the time of an attempt has gone; `ended` is when its launcher ended, if it is known."""
    steady = table.steady
    trained = steady.trained.mean(axis=0) if len(steady) else np.zeros(1)
    least = steady.waits.min(axis=0) if len(steady) else np.zeros(1)
    waits, transfer = steady.mean(steady.waits), steady.mean(least) if len(steady) else 0.0
    return Account(
        wall=wall(logs, ended),
        training=table.total,
        first=float(table.trained[:, 0].mean()) if len(table) else 0.0,
        apart=_apart(logs),
        step=steady.mean(steady.trained),
        usual=_median(trained, steady),
        slowest=float(trained.max()),
        slowest_step=int(steady.steps[trained.argmax()]) if len(steady) else 0,
        phases={name: found for name in TRAINING if (found := steady.mean(steady.of_phases(name)))},
        transfer=transfer,
        delay=max(0.0, waits - transfer),
    )


def wall(logs: Sequence[RankLog], ended: float | None = None) -> float:
    """Returns the seconds from the first rank's begin to its launcher's end, or the last sign of life of any rank."""
    begins = [log.begin["t"] - log.ahead for log in logs if log.begin]
    ends = [last(log) - log.ahead for log in logs] + ([] if ended is None else [ended])
    begins += [log.steps[0]["t"] - log.ahead for log in logs if log.steps and not log.begin]
    return measured(max(ends) - min(begins)) if begins and ends else 0.0


def last(log: RankLog) -> float:
    """Returns when a rank was last heard of, on its own clock."""
    times = [log.end["t"]] if log.end else []
    times += [line["t"] + measured(line["seconds"]) for line in log.steps[-1:]]
    return float(max([*times, log.begin.get("t", 0.0)]))


def _apart(logs: Sequence[RankLog]) -> dict[str, float]:
    sums = {
        name: fmean(sum(measured(line["spent"].get(name, 0.0)) for line in log.steps) for log in logs)
        for name in (NON_TRAINING if logs else ())
    }
    return {name: seconds for name, seconds in sums.items() if seconds}


def _median(values: Floats, table: Table) -> float:
    """The middle one of all steps, not of the columns."""
    if not len(table):
        return 0.0
    order = values.argsort()
    passed = table.counts[order].cumsum()
    return float(values[order][np.searchsorted(passed, passed[-1] / 2)])
