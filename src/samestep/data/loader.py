"""From positions in the order to batches on the host: torch's DataLoader, given our micro-batches.

DataLoader's workers, collation and pinning are kept; its samplers are not (see `order`), nor its fetching (see
`fetch`), nor its messages when a worker dies (see `workers`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from samestep.data.fetch import Fetcher, Loaded, Request, SampleSeeds
from samestep.data.order import Order, StepPartition
from samestep.data.workers import WorkerStatus, batches_of, initialise_worker


@dataclass(frozen=True, kw_only=True)
class LoaderSettings:
    worker_generator: Callable[[int], torch.Generator]  # returns the generator that an epoch's worker seeds come from
    workers: int = 0  # processes that load; 0 loads in this one
    # makes a batch of a list of samples; torch's default otherwise
    collate_fn: Callable[[list[Any]], Any] | None = None
    pin_memory: bool = False  # page-locked memory, from which a GPU copies beside its computation
    sample_seeds: SampleSeeds | None = None  # None leaves the random generators alone

    def worker_status(self) -> WorkerStatus | None:
        return WorkerStatus(self.workers) if self.workers else None

    def run(self, source: Dataset[Any], order: Order, status: WorkerStatus | None, **batching: Any) -> Iterator[Any]:
        """Yields from a DataLoader over `source`, which makes the batches itself; `batching` says what it is asked."""
        loader: DataLoader[Any] = DataLoader(
            source,
            num_workers=self.workers,
            collate_fn=_identity,
            pin_memory=self.pin_memory,
            generator=self.worker_generator(order.epoch),
            worker_init_fn=initialise_worker,
            **batching,
        )
        yield from batches_of(loader, order, status)


@dataclass(frozen=True)
class _MicroBatches:
    """The batch sampler: this rank's micro-batches, in the order of `steps`."""

    order: Order
    steps: Iterable[StepPartition]

    def __iter__(self) -> Iterator[Request]:
        for step in self.steps:
            for start, stop in step.micro:
                # an empty micro-batch loads the step's first sample, to be cut to nothing
                span = (start, stop) if stop > start else (step.start, step.start + 1)
                yield Request(self.order.epoch, span[0], self.order.take(*span).tolist(), is_empty=stop == start)


class Loader:
    """Loads this rank's micro-batches of a map-style dataset, on the host; `skip` leaves bad samples out."""

    def __init__(self, dataset: Any, settings: LoaderSettings, *, skip: bool) -> None:
        self.dataset = dataset
        self.settings = settings
        self.skip = skip

    def load(self, order: Order, steps: Iterable[StepPartition]) -> Iterator[Loaded]:
        """Calls the dataset's `set_epoch`, where it has one, and yields a batch for every micro-batch of `steps`."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(order.epoch)
        yield from self.read(order, steps)

    def read(self, order: Order, steps: Iterable[StepPartition]) -> Iterator[Loaded]:
        """Does the same without `set_epoch`."""
        settings, status = self.settings, self.settings.worker_status()
        fetcher = Fetcher(self.dataset, settings.collate_fn, seeds=settings.sample_seeds, skip=self.skip, status=status)
        yield from settings.run(fetcher, order, status, batch_sampler=_MicroBatches(order, steps))


def _identity(loaded: Any) -> Any:
    return loaded
