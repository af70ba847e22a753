"""From loaded micro-batches to steps whose weight is known: what a rank computes next, already on its device.

A mean over a step needs the weight of the whole step, and that of its first micro-batch before the others are loaded:

    a sample weighs 1            known without looking: batches go straight through
    weight(batch), or skipping   a step is loaded, and its weight summed over the ranks, while the one before computes
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from samestep.data.batches import DevicePrefetcher
from samestep.data.fetch import Loaded
from samestep.data.iterable_loader import StreamLoader
from samestep.data.ledger import Skip
from samestep.data.loader import Loader
from samestep.data.open_step import OpenStep
from samestep.data.order import Positions, StepPartition
from samestep.data.skips import Skips
from samestep.runtime.sums import PendingSum, Tag, start_sum
from samestep.runtime.world import World
from samestep.topology import tree_sum

__all__: list[str] = []


class Feed:
    """The steps of a loader, one after another.

    Args:
        loader: of this rank's micro-batches.
        world: the world.
        batch_size: samples of a step, over all ranks.
        weigh: the items in a batch that a loss is a mean over; None counts samples.
        tagged: returns the tag of the weight of the step at a position.
    """

    def __init__(
        self,
        loader: Loader | StreamLoader,
        world: World,
        *,
        batch_size: int,
        weigh: Callable[[Any], Any] | None,
        tagged: Callable[[int], Tag],
    ) -> None:
        self.skips = Skips(world) if loader.skip else None
        self._loader = loader
        self._world = world
        self._batch_size = batch_size
        self._weigh = weigh
        self._tagged = tagged
        self._mover = DevicePrefetcher(world.lands_on)

    def steps(self, order: Positions, steps: Sequence[StepPartition]) -> Iterator[tuple[OpenStep, Iterator[Any]]]:
        """Yields every step with an iterator over its micro-batches, on the device; each is used up before the next."""
        if self._mover.device != self._world.lands_on:  # a pipeline with devices of its own was made since
            self._mover = DevicePrefetcher(self._world.lands_on)
        host = self._loader.load(order, steps)
        run = self._counted if self._weigh is None and self.skips is None else self._weighted
        return run(order.epoch, steps, host)

    def _counted(
        self, _epoch: int, steps: Sequence[StepPartition], host: Iterator[Loaded]
    ) -> Iterator[tuple[OpenStep, Iterator[Any]]]:
        """A sample weighs 1 and none is skipped, so a step's weight is known without looking."""
        batches = self._mover.stream_through(loaded.batch for loaded in host)
        for step in steps:
            counts = [stop - start for start, stop in step.micro]
            yield OpenStep(step, float(step.size), counts), islice(batches, len(step.micro))

    def _weighted(
        self, epoch: int, steps: Sequence[StepPartition], host: Iterator[Loaded]
    ) -> Iterator[tuple[OpenStep, Iterator[Any]]]:
        """A step's weight is summed over the ranks while the step before it computes, so it is loaded by then."""
        ahead = self._weighed(steps[:1], host)
        for number, step in enumerate(steps):
            part, (weight, *skipped) = ahead, ahead.total.wait()
            ahead = self._weighed(steps[number + 1 : number + 2], host)
            current = OpenStep(step, weight, part.counts, part.weights if self._weigh is not None else None)
            if self.skips is not None and skipped[0]:
                current.skipped = self.skips.exchange(epoch, step, part.skipped, self._batch_size)
            yield current, map(self._mover.receive, part.batches)

    def _weighed(self, steps: Sequence[StepPartition], host: Iterator[Loaded]) -> _Part:
        """Loads this rank's part of a step (or of none), on its way to the device, and starts summing its weight."""
        batches: list[Any] = []
        counts: list[int] = []
        weights: list[float] = []
        skipped: list[Skip] = []
        for step in steps:
            for (start, stop), loaded in zip(step.micro, islice(host, len(step.micro)), strict=True):
                counts.append(stop - start - len(loaded.skipped))
                items = counts[-1] if self._weigh is None or not counts[-1] else self._weigh(loaded.batch)
                weights.append(float(items))
                skipped += loaded.skipped
                batches.append(self._mover.send(loaded.batch))
        weight = _by_slice(steps[0], weights) if steps else 0.0
        sums = (weight,) if self.skips is None else (weight, float(len(skipped)))
        tag = self._tagged(steps[0].start if steps else -1)
        return _Part(batches, counts, weights, skipped, start_sum(self._world.data, *sums, tag=tag))


def _by_slice(step: StepPartition, weights: list[float]) -> float:
    """Returns the sum of the micro-batches' weights, added as virtual ranks on any number of ranks would."""
    each = len(step.micro) // step.held
    total: float = tree_sum([sum(weights[at : at + each]) for at in range(0, len(weights), each)])
    return total


@dataclass
class _Part:
    """This rank's part of a step, loaded ahead."""

    batches: list[Any]
    counts: list[int]
    weights: list[float]
    skipped: list[Skip]
    total: PendingSum  # of the weights, and where samples may be skipped of how many were, over all ranks
