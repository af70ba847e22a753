"""Steps loaded one ahead of the computation, on their way to the device, with what the ranks must agree on.

A mean over a step needs the weight of the whole step before its first micro-batch; where samples may be skipped, or
the length of the data is unknown, every rank also needs what the others found. So while step k computes, every rank
loads its part of step k + 1 and starts one sum of two numbers: (weight, skipped samples) or (weight, items found). An
epoch of unknown length ends on all ranks when the items found add up to 0. Where a sample weighs 1, none is skipped
and the length is known, batches go straight through.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from samestep.data.batches import DevicePrefetcher, empty_like
from samestep.data.current_step import CurrentStep
from samestep.data.ledger import Skip
from samestep.data.loader import Loaded
from samestep.data.order import StepPartition
from samestep.errors import DataError
from samestep.runtime.exchange import all_gather_json
from samestep.runtime.scalar_sums import PendingSum, StepTag
from samestep.runtime.world import World
from samestep.topology import tree_sum

MOST_NAMED = 10  # skipped samples that standard error names; the ledger has all

Steps = Iterator[tuple[CurrentStep, Iterator[Any]]]  # each with its micro-batches, which are used up before the next


@dataclass(frozen=True)
class StepPart:
    """This rank's part of a step, on the host."""

    batches: list[Any]  # one for each micro-batch; of a rank's own stream there may be fewer
    counts: list[int]  # items in each
    step: StepPartition | None = None  # its partition; None where every rank has a stream of its own
    skipped: tuple[Skip, ...] = ()  # samples of this rank's that were left out

    @property
    def size(self) -> int:
        """Items of the step that this rank knows of: all of them in one stream, else its own."""
        return sum(self.counts) if self.step is None else self.step.size


def parts_of(steps: Iterator[StepPartition], host: Iterator[Loaded]) -> Iterator[StepPart]:
    """Yields this rank's part of each step, from one loaded batch for every micro-batch."""
    for step in steps:
        loaded = list(islice(host, len(step.micro)))
        counts = [stop - start - len(one.skipped) for (start, stop), one in zip(step.micro, loaded, strict=True)]
        skipped = tuple(skip for one in loaded for skip in one.skipped)
        yield StepPart([one.batch for one in loaded], counts, step, skipped)


@dataclass
class _Started:
    """A part on its way to the device, and the sum of (weight, skipped or found) over all ranks on its way here."""

    part: StepPart | None
    batches: list[Any]
    weights: list[float]
    total: PendingSum


@dataclass(eq=False)
class StepPipeline:
    world: World
    batch_size: int  # samples of a step, over all ranks
    weigh: Callable[[Any], Any] | None  # the items in a batch that a loss is a mean over; None counts samples
    weight_tag: Callable[[int], StepTag]  # returns the tag of the weight of the step at a position
    skips: SkipLog | None = None  # None where no sample may be skipped
    is_bounded: bool = True  # the length of the data is known
    own_micro: int | None = None  # micro-batches of a step where each rank has a stream of its own; else None
    empty: Any = None  # a host batch without samples, once there was one with

    def __post_init__(self) -> None:
        self._prefetcher = DevicePrefetcher(self.world.input_device)

    def run(self, epoch: int, position: int, steps: Iterator[StepPartition], host: Iterator[Loaded]) -> Steps:
        self._check_device()
        if self.weigh is None and self.skips is None:
            return self._straight(steps, host)
        return self.run_agreed(epoch, position, parts_of(steps, host))

    def _check_device(self) -> None:
        if self._prefetcher.device != self.world.input_device:  # a pipeline with devices of its own was made since
            self._prefetcher = DevicePrefetcher(self.world.input_device)

    def _straight(self, steps: Iterator[StepPartition], host: Iterator[Loaded]) -> Steps:
        batches = self._prefetcher.stream_through(loaded.batch for loaded in host)
        for step in steps:
            counts = [stop - start for start, stop in step.micro]
            yield CurrentStep(step, float(step.size), counts), islice(batches, len(step.micro))

    def run_agreed(self, epoch: int, position: int, parts: Iterator[StepPart]) -> Steps:
        """Yields the steps that begin at `position`, each agreed on by all ranks."""
        self._check_device()
        started = self._start(next(parts, None), position)
        while (current := self._agree(epoch, position, started)) is not None:
            position = current.step.stop
            following = self._start(next(parts, None), position)
            yield current, map(self._prefetcher.receive, started.batches)
            started = following

    def learn_empty(self, part: StepPart) -> None:
        if self.empty is None and part.batches:
            self.empty = empty_like(part.batches[0], own=True)

    def _start(self, part: StepPart | None, position: int) -> _Started:
        found = part or StepPart([], [])
        weights = [
            float(count if self.weigh is None or not count else self.weigh(batch))
            for batch, count in zip(found.batches, found.counts, strict=True)
        ]
        if self.own_micro is not None:
            self.learn_empty(found)
        count = len(found.skipped) if self.is_bounded else found.size
        extra = () if self.is_bounded and self.skips is None else (float(count),)
        total = self.world.data.start_sum(_total(found, weights), *extra, tag=self.weight_tag(position))
        return _Started(part, list(map(self._prefetcher.send, found.batches)), weights, total)

    def _agree(self, epoch: int, position: int, started: _Started) -> CurrentStep | None:
        """Returns the step as all ranks see it; None at the end."""
        part = started.part
        if self.is_bounded and part is None:
            return None
        weight, *extra = started.total.wait()
        if self.own_micro is not None:
            return self._own_step(started, position, int(extra[0]), weight) if extra[0] else None
        weights = started.weights if self.weigh is not None else None
        if not self.is_bounded:
            self._check_same_stream(position, 0 if part is None else part.size, int(extra[0]))
            if part is None or part.size == 0:
                return None
        assert part is not None
        assert part.step is not None
        current = CurrentStep(part.step, weight, part.counts, weights)
        if self.skips is not None and extra[0]:
            current.skipped = self.skips.exchange(epoch, part.step, part.skipped, self.batch_size)
        return current

    def _check_same_stream(self, position: int, mine: int, found: int) -> None:
        ranks = self.world.data.size
        if found != mine * ranks:
            raise DataError(
                f"the ranks read different streams: from item {position} on, this one finds {mine} for the step, "
                f"all {ranks} ranks together {found}. The stream must be the same on every rank; a dataset that gives "
                "each rank and worker its own part needs splits_itself=True"
            )

    def _own_step(self, started: _Started, position: int, size: int, weight: float) -> CurrentStep:
        part = started.part or StepPart([], [])
        missing = (self.own_micro or 1) - len(started.batches)
        if missing and self.empty is None:
            raise DataError(
                f"the stream of rank {self.world.data.rank} gives nothing at all, so there is nothing to cut an empty "
                "batch from: give every rank at least one item"
            )
        started.batches += [self._prefetcher.send(empty_like(self.empty)) for _ in range(missing)]
        counts = part.counts + [0] * missing
        step = StepPartition(position, position + size, tuple((position, position + count) for count in counts))
        return CurrentStep(step, weight, counts, None if self.weigh is None else started.weights + [0.0] * missing)


def _total(part: StepPart, weights: list[float]) -> float:
    """The sum of the micro-batches' weights, added as virtual ranks on any number of ranks would."""
    slices = 1 if part.step is None else part.step.local_slices
    each = max(1, len(weights) // slices)
    total: float = tree_sum([sum(weights[at : at + each]) for at in range(0, len(weights), each)] or [0.0])
    return total


class SkipLog:
    """The skipped samples of steps that are not yet committed, the same on every rank.

    A rank alone knows which of its samples were bad. How many there were on all ranks comes with the weight of the
    step, so all ranks know whether there is anything to exchange.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._named = 0
        self._of_step: dict[int, tuple[Skip, ...]] = {}  # finished steps, by their first position

    def exchange(self, epoch: int, step: StepPartition, mine: tuple[Skip, ...], batch_size: int) -> tuple[Skip, ...]:
        """Returns what all ranks skipped in a step, in the order's order. Collective."""
        rows = [(skip.position, skip.index, skip.reason) for skip in mine]
        everyone = [Skip(*row) for rows in all_gather_json(self._world.data, rows) for row in rows]
        found = tuple(sorted(everyone, key=lambda skip: skip.position))
        if len(found) == step.size == batch_size > 1:
            raise DataError(
                f"all {step.size} samples of a step are bad, which is the dataset and not a sample; the first is "
                f"sample {found[0].index}: {found[0].reason}"
            )
        for skip in found:
            self._named += 1
            if self._world.is_first and self._named <= MOST_NAMED:
                rest = "; more will only be recorded" if self._named == MOST_NAMED else ""
                sys.stderr.write(f"samestep: skips sample {skip.index} in epoch {epoch}: {skip.reason}{rest}\n")
        return found

    def record(self, step: StepPartition, skipped: tuple[Skip, ...]) -> None:
        if skipped:
            self._of_step[step.start] = skipped

    def take(self, start: int) -> tuple[Skip, ...]:
        """Returns what the step that starts there has skipped; it is committed now."""
        return self._of_step.pop(start, ())

    def discard(self) -> None:
        self._of_step.clear()
