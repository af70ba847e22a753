"""From positions in the order to batches on the host: torch's DataLoader, fed with our cut.

DataLoader's workers, collation and pinning are kept; its samplers are not (see `order`), nor its fetching (see
`fetch`), nor what it says when a worker dies (see `workers`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from samestep.data import workers as processes
from samestep.data.fetch import Board, Fetcher, Loaded, Request
from samestep.data.order import Positions, StepPartition
from samestep.data.streams import SampleSeeds
from samestep.errors import DataError

__all__: list[str] = []


def check_dataset(dataset: Any) -> int:
    """Returns the number of samples, or raises DataError where the dataset cannot be cut."""
    name = type(dataset).__name__
    if isinstance(dataset, DataLoader):
        raise DataError(
            "shards takes the dataset, not a DataLoader: samestep.shards(loader.dataset, world, batch_size=…, "
            "workers=…, collate_fn=…)"
        )
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise DataError(
            f"{name} has no random access (an iterable dataset?): shards cuts one global order, so the dataset needs "
            "__len__ and __getitem__"
        )
    try:
        size = len(dataset)
    except (TypeError, NotImplementedError) as error:
        raise DataError(f"{name} has no length: shards needs __len__, to know where an epoch ends") from error
    if size < 1:
        raise DataError(f"{name} is empty: an epoch of 0 samples has no step")
    return size


@dataclass(frozen=True)
class _MicroBatches:
    """The batch sampler: this rank's micro-batches, in the order of `steps`."""

    order: Positions
    steps: Sequence[StepPartition]

    def __iter__(self) -> Iterator[Request]:
        for step in self.steps:
            for start, stop in step.micro:
                # an empty micro-batch loads the step's first sample, to be cut to nothing
                span = (start, stop) if stop > start else (step.start, step.start + 1)
                yield Request(self.order.epoch, span[0], self.order.take(*span).tolist(), is_empty=stop == start)


@dataclass(frozen=True, kw_only=True)
class Loading:
    """How a rank loads, whatever it is.

    Attributes:
        workers: processes that load; 0 loads in this one.
        collate_fn: makes a batch of a list of samples; torch's default otherwise.
        pin_memory: page-locked memory, from which a GPU copies beside its computation.
        seeded: returns the generator that an epoch's worker seeds come from.
        streams: of the samples; None leaves the random generators alone.
    """

    seeded: Callable[[int], torch.Generator]
    workers: int = 0
    collate_fn: Callable[[list[Any]], Any] | None = None
    pin_memory: bool = False
    streams: SampleSeeds | None = None

    def board(self) -> Board | None:
        """Returns what the workers write on, if there are any."""
        return Board(self.workers) if self.workers else None

    def run(self, source: Dataset[Any], order: Positions, board: Board | None, **how: Any) -> Iterator[Any]:
        """Yields what DataLoader makes of `source`, which makes the batches itself; `how` says what it is asked for."""
        loader: DataLoader[Any] = DataLoader(
            source,
            num_workers=self.workers,
            collate_fn=_as_it_is,
            pin_memory=self.pin_memory,
            generator=self.seeded(order.epoch),
            worker_init_fn=processes.start,
            **how,
        )
        yield from processes.batches_of(loader, order, board)


class Loader:
    """Loads this rank's micro-batches, on the host.

    Args:
        dataset: map-style; `set_epoch(epoch)` is called where it has one.
        how: it loads.
        skip: leave bad samples out.
    """

    def __init__(self, dataset: Any, how: Loading, *, skip: bool) -> None:
        self.dataset = dataset
        self.how = how
        self.skip = skip

    def load(self, order: Positions, steps: Sequence[StepPartition]) -> Iterator[Loaded]:
        """Yields one host batch for every micro-batch of `steps`.

        Raises:
            DataError: a sample could not be loaded, or a worker died; says which and why.
        """
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(order.epoch)
        yield from self.read(order, steps)

    def read(self, order: Positions, steps: Sequence[StepPartition]) -> Iterator[Loaded]:
        """Does the same without a word to the dataset about the epoch."""
        board = self.how.board()
        fetcher = Fetcher(self.dataset, self.how.collate_fn, streams=self.how.streams, skip=self.skip, board=board)
        yield from self.how.run(fetcher, order, board, batch_sampler=_MicroBatches(order, steps))


def _as_it_is(loaded: Any) -> Any:
    return loaded
