"""Steps that are known only once they are loaded, agreed between the ranks one step ahead.

Where nobody knows the length of the data, a rank that runs out of them leaves the others waiting in the next reduction.
So while step k computes, every rank loads its share of step k + 1 and tells the others what it found:

    step k + 1   rank 0: 4 items, weight 4       rank 1: 3 items, weight 3       sum 7: on both, a step of weight 7
    step k + 2   rank 0: 1 item, weight 1        rank 1: nothing                 rank 1 gets an empty batch
    step k + 3   rank 0: nothing                 rank 1: nothing                 sum 0: the epoch ends, on both

Ranks that read one and the same stream must find the same in it; what they say of a step adds up to N times its size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from samestep.data.batches import DevicePrefetcher, empty_like
from samestep.data.open_step import OpenStep
from samestep.data.order import StepPartition
from samestep.errors import DataError
from samestep.runtime.sums import PendingSum, Tag, start_sum
from samestep.runtime.world import World
from samestep.topology import tree_sum

__all__: list[str] = []


@dataclass(frozen=True)
class Share:
    """This rank's share of a step, on the host.

    Attributes:
        batches: one for each micro-batch; of its own stream there may be fewer.
        counts: items in each.
        step: where all ranks read one stream, its cut; else None.
    """

    batches: list[Any]
    counts: list[int]
    step: StepPartition | None = None

    @property
    def size(self) -> int:
        """Items of the step as this rank knows it: all of them in one stream, else its own."""
        return sum(self.counts) if self.step is None else self.step.size


class LookAhead:
    """The steps of data whose end comes as a surprise.

    Args:
        world: the world.
        weigh: the items in a batch that a loss is a mean over; None counts samples.
        tagged: returns the tag of the weight of the step at a position.
        own: micro-batches of a step where every rank has a stream of its own; None where all read the same.
    """

    def __init__(
        self, world: World, *, weigh: Callable[[Any], Any] | None, tagged: Callable[[int], Tag], own: int | None = None
    ) -> None:
        self._world = world
        self._weigh = weigh
        self._tagged = tagged
        self._own = own
        self._mover = DevicePrefetcher(world.lands_on)
        self.empty: Any = None  # a host batch without samples, once there was one with

    def learn(self, share: Share) -> None:
        """Notes what a batch looks like, for when there are none."""
        if self.empty is None and share.batches:
            self.empty = empty_like(share.batches[0], own=True)

    def steps(self, shares: Iterator[Share], start: int) -> Iterator[tuple[OpenStep, Iterator[Any]]]:
        """Yields every step with an iterator over its micro-batches, on the device; each is used up before the next.

        Raises:
            DataError: the ranks do not read the same stream; or one whose stream is empty has nothing to cut an empty
                batch from.
        """
        if self._mover.device != self._world.lands_on:  # a pipeline with devices of its own was made since
            self._mover = DevicePrefetcher(self._world.lands_on)
        ahead = self._weighed(next(shares, None), start)
        while True:
            part = ahead
            weight, found = part.total.wait()
            size = self._agreed(part.share, int(found), start)
            if size == 0:
                return
            current = self._opened(part, start, size, weight)
            start += size
            ahead = self._weighed(next(shares, None), start)
            yield current, map(self._mover.receive, part.batches)

    def _weighed(self, share: Share | None, start: int) -> _Part:
        share = share or Share([], [])
        weights = [
            float(count if self._weigh is None or not count else self._weigh(batch))
            for batch, count in zip(share.batches, share.counts, strict=True)
        ]
        self.learn(share)
        batches = list(map(self._mover.send, share.batches))
        total = start_sum(self._world.data, _total(share, weights), float(share.size), tag=self._tagged(start))
        return _Part(share, batches, weights, total)

    def _agreed(self, share: Share, found: int, start: int) -> int:
        """Returns the items of the step over all ranks; 0 at the end."""
        if self._own:
            return found
        ranks = self._world.data.size
        if found != share.size * ranks:
            raise DataError(
                f"the ranks read different streams: from item {start} on, this one finds {share.size} for the step, "
                f"all {ranks} ranks together {found}. The stream must be the same on every rank; a dataset that gives "
                "each rank and worker its own part needs splits_itself=True"
            )
        return share.size

    def _opened(self, part: _Part, start: int, size: int, weight: float) -> OpenStep:
        weights = part.weights if self._weigh is not None else None
        if part.share.step is not None:
            return OpenStep(part.share.step, weight, part.share.counts, weights)
        lacking = (self._own or 1) - len(part.batches)
        if lacking and self.empty is None:
            raise DataError(
                f"the stream of rank {self._world.data.rank} gives nothing at all, so there is nothing to cut an empty "
                "batch from: give every rank at least one item"
            )
        part.batches += [self._mover.send(empty_like(self.empty)) for _ in range(lacking)]
        counts = part.share.counts + [0] * lacking
        spans = tuple((start, start + count) for count in counts)
        return OpenStep(
            StepPartition(start, start + size, spans), weight, counts, weights and weights + [0.0] * lacking
        )


@dataclass
class _Part:
    """This rank's share of a step, on its way to the device."""

    share: Share
    batches: list[Any]
    weights: list[float]
    total: PendingSum  # of the weights, and of the items found, over all ranks


def _total(share: Share, weights: list[float]) -> float:
    """The sum of the micro-batches' weights, added as virtual ranks on any number of ranks would."""
    held = 1 if share.step is None else share.step.held
    each = max(1, len(weights) // held)
    total: float = tree_sum([sum(weights[at : at + each]) for at in range(0, len(weights), each)] or [0.0])
    return total
