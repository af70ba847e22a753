"""Where the steps of all ranks go, as one table: a row for each rank, a column for what each of them has a line of.

               step 1        step 2        …                 own    = data, forward, backward, optimizer, other
    rank 0     own │ waits   own │ waits   …                 waits  = wait, collective
    rank 1     own ── │ w    own ── │ w    …                 apart  = evaluate, save, load: no training

The ranks of a step leave it together, so a slow rank is seen by its own time, and by how little it waits. Beyond the
10,000th step one column stands for several steps; numbers are seconds of one step all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samestep.events import NON_TRAINING, PHASES
from samestep.reporting.record import Event, RankLog

__all__: list[str] = []

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

WAITS = ("wait", "collective")
TRAINING = tuple(name for name in PHASES if name not in NON_TRAINING)
OWN = tuple(name for name in TRAINING if name not in WAITS)
_LONGEST = 1e9  # seconds; more is no measurement
_LATEST = 1 << 53  # steps likewise


@dataclass(frozen=True)
class Table:
    """A run's steps.

    Attributes:
        ranks: by row.
        steps: by column, the last step that it stands for.
        counts: by column, how many steps those are.
        spent: (row, column, phase): seconds of a step.
        left_out: ranks that have too few steps to be compared, and how many they have.
    """

    ranks: tuple[int, ...]
    steps: Ints
    counts: Ints
    spent: Floats
    left_out: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, logs: Sequence[RankLog]) -> Table:
        """Returns the table of the ranks of an attempt; a rank that has less than half of the steps is left out."""
        lines = {log.rank: sound(log.steps) for log in logs}
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

    def columns(self, chosen: slice | NDArray[Any]) -> Table:
        """Returns the table of some columns."""
        return replace(self, steps=self.steps[chosen], counts=self.counts[chosen], spent=self.spent[:, chosen])

    @cached_property
    def steady(self) -> Table:
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


def sound(lines: Sequence[Event]) -> dict[int, Event]:
    """Returns lines that stand for steps, by the last of these; of two of one step the later counts."""
    return {line["step"]: line for line in lines if 0 < line["step"] < _LATEST and 0 < line["steps"] < _LATEST}


def measured(value: Any) -> float:
    """Returns a number of seconds as one can count with; 0 for what is none.

    >>> measured(1.5), measured(-1), measured(float("nan")), measured(10**400)
    (1.5, 0.0, 0.0, 1000000000.0)
    """
    return float(min(value, _LONGEST)) if value > 0 else 0.0


def _seconds(line: Event) -> list[float]:
    """Returns the seconds of one step by phase; what belongs to none is "other"."""
    spent = [measured(line["spent"].get(name, 0.0)) for name in PHASES]
    spent[PHASES.index("other")] += max(0.0, measured(line["seconds"]) - sum(spent))
    return [value / line["steps"] for value in spent]
