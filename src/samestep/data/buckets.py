"""Steps of samples that cost alike: within a window of the order, sorted by cost and cut into steps.

Where lengths differ a hundredfold, a step of random samples pads most of them to the longest, whoever computes them.
Bucketing lets similar ones meet. Stock bucketing samplers do it on every rank by itself, so what a step holds depends
on the number of ranks. Here it is one more rearrangement of the one order, alike for any number of them:

    order            7 2 9 1 3 8 | 2 4 6 5 1 9 | 3 8 …     costs; a window is 3 steps of 2
    sorted           1 2 3 7 8 9 | 1 2 4 5 6 9 |
    cut into steps   12  37  89  | 12  45  69  |
    steps shuffled   37  89  12  | 69  12  45  |           by the seed, the epoch and the window

A window holds what it held, so every sample still comes once an epoch. Where the epoch ends with a short step, that one
is taken from somewhere in its window, drawn likewise, so that it is not always the dearest that end up in it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from samestep.data.costs import Costs, by_cost
from samestep.data.order import Indices, SampleOrder
from samestep.errors import DataError
from samestep.seeding import derive_seed

__all__: list[str] = []


@dataclass(frozen=True)
class Buckets:
    """How an order is bucketed.

    Attributes:
        costs: of the samples.
        steps: of a window.
        batch_size: samples of a step.
        end: one past the last position that is used.
    """

    costs: Costs
    steps: int
    batch_size: int
    end: int

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise DataError(f"bucket={self.steps} must be at least 1: the steps of a window")

    @property
    def window(self) -> int:
        """Samples of a window."""
        return self.steps * self.batch_size

    def state(self) -> dict[str, Any]:
        """Returns what must be the same for a position to mean the same, as plain data."""
        return {"steps": self.steps, "batch_size": self.batch_size, "costs": self.costs.digest}

    @property
    def name(self) -> str:
        """A digest of that, for the ledger."""
        return hashlib.blake2b(repr(self.state()).encode(), digest_size=4).hexdigest()


def check_position(cursor: int, saved: Any, mine: Buckets | None) -> None:
    """Refuses a position within a window that is cut otherwise here.

    Args:
        cursor: positions before it are consumed.
        saved: what :meth:`Buckets.state` returned in the run that consumed them; None without buckets.
        mine: how the order is bucketed from here on.

    Raises:
        DataError: some samples of the window would be used twice, others never.
    """
    if (None if mine is None else mine.state()) == (None if saved is None else dict(saved)):
        return
    old = 1 if saved is None else int(saved["steps"]) * int(saved["batch_size"])
    new = 1 if mine is None else mine.window
    if cursor % old or cursor % new:
        raise DataError(
            f"the saved run stands at position {cursor}, within a window of {old if cursor % old else new} samples: "
            "bucket=, batch_size and the costs must stay what they were until that window is over"
        )


class Bucketed:
    """An order with buckets."""

    def __init__(self, order: SampleOrder, buckets: Buckets) -> None:
        self.epoch = order.epoch
        self.size = order.size
        self._order = order
        self._buckets = buckets
        self._windows: dict[int, Indices] = {}

    def take(self, start: int, stop: int) -> Indices:
        """Returns the samples at positions [start, stop), shape [stop - start], int64."""
        window, end = self._buckets.window, min(stop, self._buckets.end)
        parts = [
            self._arranged(first)[max(start - first, 0) : end - first]
            for first in range(start - start % window, end, window)
        ]
        beyond = self._order.take(max(start, end), stop)  # what drop_last leaves out
        return np.concatenate([*parts, beyond])

    def _arranged(self, start: int) -> Indices:
        """The samples of the window that starts there; two are kept, where loading is and where committing is."""
        if start not in self._windows:
            if len(self._windows) == 2:
                del self._windows[next(iter(self._windows))]
            self._windows[start] = self._bucketed(start)
        return self._windows[start]

    def _bucketed(self, start: int) -> Indices:
        order, buckets = self._order, self._buckets
        indices = by_cost(order.take(start, min(start + buckets.window, buckets.end)), buckets.costs)
        steps, rest = divmod(len(indices), buckets.batch_size)
        number = start // buckets.window
        seed = derive_seed(order.seed, "bucket", order.epoch, number)
        # a run that is not shuffled goes from the cheapest to the dearest
        gap = (seed % (steps + 1) if order.shuffle else steps) * buckets.batch_size
        short = indices[gap : gap + rest]
        whole = np.delete(indices, slice(gap, gap + rest)).reshape(steps, buckets.batch_size)
        if steps:
            whole = whole[SampleOrder(steps, seed, order.epoch, order.shuffle).take(0, steps)]
        return np.concatenate([whole.reshape(-1), short])
