"""Steps divided by cost: which samples share a step, and which rank computes them.

A step of texts, cut into equally many samples, takes as long as the rank with the longest text. Here the samples of a
step stay those of the order; they are sorted by cost and cut so that the slowest rank has little more to do than the
others (:class:`CostBalancedOrder`). A part of a micro-batch costs its number of samples times its largest cost: what a
padded batch takes. With buckets samples that cost alike also share a step, within windows of the order, alike for any
number of ranks (:class:`BucketedOrder`). See docs/data.md.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samestep.data.order import Indices, Order, SampleOrder, StepPartition, StepPartitioner
from samestep.errors import DataError
from samestep.seeding import derive_seed
from samestep.topology import cut_evenly

TOLERANCE = 1024  # the largest part is at most 1/1024 dearer than it need be
_KEPT = 4  # steps: loaded ahead, computed, committed
_PROBES = 4096  # samples whose costs a digest is made of

Values = NDArray[np.float64]
Span = tuple[int, int]


class Costs:
    """What each sample of a dataset of `size` samples costs: a number for each, or a callable that returns it."""

    def __init__(self, cost: Callable[[int], Any] | Sequence[Any] | Any, size: int) -> None:
        self._each: Callable[[int], Any] | None = cost if callable(cost) else None
        self._all = np.empty(0) if callable(cost) else _numbers(cost)
        if self._each is None and self._all.shape != (size,):
            raise DataError(f"cost has shape {list(self._all.shape)} for {size} samples: give one number for each")
        if self._each is None:
            _check(self._all, np.arange(size))
        probes = np.unique(np.linspace(0, size - 1, min(size, _PROBES)).astype(np.int64))
        data = self.of(probes).astype("<f8").tobytes()
        self.digest = hashlib.blake2b(data, digest_size=8).hexdigest()

    def of(self, indices: Indices) -> Values:
        if self._each is None:
            return self._all[indices]
        values = _numbers([self._each(index) for index in indices.tolist()])
        _check(values, indices)
        return values


def _numbers(values: Any) -> Values:
    try:
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"the costs are not numbers: {error}") from error


def _check(values: Values, indices: Indices) -> None:
    wrong = ~np.isfinite(values) | (values < 0)
    if values.shape != indices.shape or wrong.any():
        at = int(np.argmax(wrong)) if values.shape == indices.shape else 0
        raise DataError(
            f"sample {indices[at]} costs {values[at]}: a cost is one number, finite and at least 0, such as the length "
            "of a text"
        )


def by_cost(indices: Indices, costs: Costs) -> Indices:
    """Returns samples in the order of their costs; equal ones stay as they are."""
    return indices[np.argsort(costs.of(indices), kind="stable")]


# --- one step --------------------------------------------------------------------------------


def padded_cost(costs: Values, span: Span) -> float:
    start, stop = span
    return (stop - start) * float(costs[stop - 1]) if stop > start else 0.0


def cut_by_cost(costs: Values, parts: int, most: int | None = None) -> list[Span]:
    """Cuts ascending costs into contiguous parts, the dearest of which is nearly as cheap as it can be.

    No part is empty unless there are fewer samples; none has more than `most`.

    >>> cut_by_cost(np.array([1.0, 2, 2, 3, 4, 7, 8, 9]), 2)
    [(0, 5), (5, 8)]
    """
    count = len(costs)
    if count == 0:
        return [(0, 0)] * parts
    best = cut_evenly(count, parts)
    low, high = float(costs[-1]), -(-count // parts) * float(costs[-1])
    while high - low > high / TOLERANCE:
        middle = (low + high) / 2
        found = _cut_below(costs, parts, most, middle)
        if found is None:
            low = middle
        else:
            best, high = found, middle
    return best


def _cut_below(costs: Values, parts: int, most: int | None, bound: float) -> list[Span] | None:
    """Returns parts, none dearer than `bound`: each takes as much as it may, from the dearest sample down."""
    spans: list[Span] = []
    stop = len(costs)
    for left in reversed(range(parts)):  # parts that come after this one
        dearest = float(costs[stop - 1]) if stop else 0.0
        take = int(bound / dearest) if dearest > 0 else stop
        take = min(take, max(stop - left, 1), most or stop, stop)
        spans.append((stop - take, stop))
        stop -= take
    return None if stop else spans[::-1]


def cut_step(costs: Values, micro: int, parts: int, most: int | None = None) -> list[list[Span]]:
    """Cuts a step's sorted costs into micro-batches, and each of these into parts.

    A micro-batch of all ranks together is the same set of samples on any number of ranks. Where `most` leaves no
    choice, parts of a micro-batch differ in cost; then the part that has had the cheapest so far takes the dearest.

    Returns:
        For every part, its spans of the step, one in each micro-batch.
    """
    spent = [0.0] * parts
    taken: list[list[Span]] = [[] for _ in range(parts)]
    for low, high in reversed(cut_evenly(len(costs), micro)):
        inside = costs[low:high]
        spans = sorted(cut_by_cost(inside, parts, most), key=lambda span: -padded_cost(inside, span))
        for part, span in zip(sorted(range(parts), key=lambda part: spent[part]), spans, strict=True):
            spent[part] += padded_cost(inside, span)
            taken[part].append((low + span[0], low + span[1]))
    return [spans[::-1] for spans in taken]


class CostBalancedOrder:
    """An order whose steps are sorted by cost, each separately, and how they are divided.

    The first step starts at position `origin`.
    """

    def __init__(self, order: Order, partitioner: StepPartitioner, costs: Costs, origin: int) -> None:
        self.epoch = order.epoch
        self.size = order.size
        self._order = order
        self._partitioner = partitioner
        self._costs = costs
        self._origin = origin
        self._sorted: dict[int, Indices] = {}

    def take(self, start: int, stop: int) -> Indices:
        """Returns the samples at positions [start, stop) of one step."""
        first = start - (start - self._origin) % self._partitioner.batch_size
        return self._step(first)[start - first : stop - first]

    def _step(self, start: int) -> Indices:
        if start not in self._sorted:
            if len(self._sorted) == _KEPT:
                del self._sorted[next(iter(self._sorted))]
            stop = min(start + self._partitioner.batch_size, self._partitioner.end)
            self._sorted[start] = by_cost(self._order.take(start, stop), self._costs)
        return self._sorted[start]

    def digest(self, start: int) -> int:
        """Returns a digest of the costs of the step that starts there, so that ranks can compare theirs; 0 of none."""
        if not self._origin <= start < self._partitioner.end:
            return 0
        data = self._costs.of(self._step(start)).astype("<f8").tobytes()
        return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")

    def step(self, start: int) -> StepPartition:
        """Returns the step that starts at position `start`; its micro-batches are spans of this order."""
        how = self._partitioner
        plain = how.step(start)
        costs = self._costs.of(self._step(start))
        parts = cut_step(costs, len(plain.micro) // how.local_slices, how.ranks, how.micro_batch_size)
        mine = [span for part in parts[how.rank : how.rank + how.local_slices] for span in part]
        micro = tuple((start + low, start + high) for low, high in mine)
        return StepPartition(start, plain.stop, micro, how.local_slices)


# --- buckets ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Buckets:
    costs: Costs  # of the samples
    steps: int  # of a window
    batch_size: int  # samples of a step
    end: int  # one past the last position that is used

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise DataError(f"bucket={self.steps} must be at least 1: the steps of a window")

    @property
    def window(self) -> int:
        return self.steps * self.batch_size

    def state(self) -> dict[str, Any]:
        """Returns what must be the same for a position to mean the same, as plain data."""
        return {"steps": self.steps, "batch_size": self.batch_size, "costs": self.costs.digest}

    @property
    def name(self) -> str:
        """A digest of that, for the ledger."""
        return hashlib.blake2b(repr(self.state()).encode(), digest_size=4).hexdigest()


def check_position(cursor: int, saved: Any, mine: Buckets | None) -> None:
    """Raises DataError at a position within a window that is bucketed otherwise here.

    Some samples of the window would be used twice, others never. `saved` is the :meth:`Buckets.state` of the run that
    consumed the positions before the cursor; None without buckets.
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


class BucketedOrder:
    """An order whose windows are sorted by cost and cut into steps, which are then shuffled.

    A window holds what it held, so every sample still comes once an epoch. Where the epoch ends with a short step, that
    one is taken from somewhere in its window, so that it is not always the dearest that end up in it.
    """

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
            self._window(first)[max(start - first, 0) : end - first]
            for first in range(start - start % window, end, window)
        ]
        beyond = self._order.take(max(start, end), stop)  # what drop_last leaves out
        return np.concatenate([*parts, beyond])

    def _window(self, start: int) -> Indices:
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
