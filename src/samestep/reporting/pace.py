"""Which rank holds the others up, and by how much: each one's own time against that of the others.

    own time of rank 3     22 22 22 22          without rank 3 the slowest were 18: each step would take 4 less,
    of the others          18 18 17 18          whatever the others wait meanwhile

What would be gained if a rank were never the last is, step by step, the greatest own time less the greatest of the
others. A rank that is merely the last by chance now and then is not blamed: it is given no more than the difference
of the means, and nothing unless it is the last, by a twentieth, in a quarter of the steps, of 15 or more.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from samestep.reporting.table import OWN, Floats, Table

__all__: list[str] = []


FEWEST = 15  # steps of which it can be said
OFTEN, CLEARLY = 0.25, 1.05  # in so many of them, by so much


@dataclass(frozen=True)
class Straggler:
    """The rank that holds the others up most.

    Attributes:
        rank: which.
        own: its own seconds of a step.
        others: the median of the others'.
        phase: in which it loses most.
        gain: seconds that every step would be shorter, if it kept up.
    """

    rank: int
    own: float
    others: float
    phase: str
    gain: float


@dataclass(frozen=True)
class Pace:
    """How fast each rank is.

    Attributes:
        table: of the steps.
    """

    table: Table

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
