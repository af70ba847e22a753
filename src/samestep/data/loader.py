"""Batches on the host, from positions in the order: torch's DataLoader, given our micro-batches.

DataLoader's workers, collation and pinning are kept; its samplers are not (see `order`), nor its messages when a worker
dies (see `workers`), nor its fetching: every sample is loaded under a random stream of its own, seeded from (seed,
epoch, index). With torch's one seed for each worker a sample's augmentation depends on which worker loads it, and after
how many others. The errors of a sample name it, and if asked it is left out and recorded. A micro-batch of which
nothing is left becomes an empty one, cut from another sample so that every other dim and dtype is right.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    Subset,
    TensorDataset,
    default_collate,
    get_worker_info,
)

from samestep.data.batches import empty_like
from samestep.data.ledger import Skip
from samestep.data.order import Order, StepPartition
from samestep.data.workers import WorkerStatus, batches_of, initialise_worker, shortened
from samestep.errors import DataError
from samestep.launch.rank.user_code import user_line
from samestep.runtime.rng import HOST, preserve_rng
from samestep.seeding import GOLDEN, derive_seed, splitmix64

LONGEST_REASON = 200  # characters of an exception's message that the ledger keeps
_TRIES = 64  # samples tried until one can be loaded, to cut an empty batch from
_DETERMINISTIC = {TensorDataset, list, tuple, range}


# --- random streams --------------------------------------------------------------------------


@dataclass(frozen=True)
class SampleSeeds:
    """The seeds of a run's samples; `seed` is that of the order.

    To seed takes 7 us a sample (3.3 for Python's generator, 2 for each of the others); and with workers=0 it takes
    0.1 ms a micro-batch to keep the rank's own streams as they were. Datasets that cannot draw are not charged.
    """

    seed: int

    def words(self, epoch: int, indices: list[int]) -> list[int]:
        """Returns 64 bits for each of these samples, to seed their generators from."""
        return self._words("samples", epoch, indices)

    def seed_batch(self, epoch: int, position: int) -> None:
        """Seeds the generators for what is done to a whole micro-batch: the one that starts at `position`."""
        seed_global_rngs(self._words("batches", epoch, [position])[0])

    def _words(self, purpose: str, epoch: int, numbers: list[int]) -> list[int]:
        key = derive_seed(self.seed, purpose, epoch)
        steps = np.array(numbers, dtype=np.uint64) * np.uint64(GOLDEN)
        words: list[int] = splitmix64(steps + np.uint64(key)).tolist()
        return words


def seed_global_rngs(word: int) -> None:
    """Seeds Python's, NumPy's and torch's generators on the CPU from 64 bits.

    NumPy and torch take a half each: they are the same Mersenne Twister, and would draw the same from the same seed.
    """
    random.seed(word)
    np.random.seed(word >> 32)  # noqa: NPY002  (the global generator is the one that transforms draw from)
    torch.default_generator.manual_seed(word & 0xFFFFFFFF)  # torch.manual_seed, at 60 times the price, sees to GPUs


def is_deterministic_dataset(dataset: Any) -> bool:
    """Whether a dataset is one of those that hold their samples, and cannot draw a random number."""
    if type(dataset) is Subset:
        return is_deterministic_dataset(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(is_deterministic_dataset(part) for part in dataset.datasets)
    return type(dataset) in _DETERMINISTIC


# --- batches ---------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class Loaded:
    batch: Any
    skipped: tuple[Skip, ...] = ()  # samples that it is without
    items: int = 0  # that its step has, or of a rank's own stream the batch; only streams say it

    def pin_memory(self) -> Loaded:
        """Returns it with its tensors in page-locked memory; DataLoader calls it."""
        pinned = torch.utils.data._utils.pin_memory.pin_memory(self.batch)  # type: ignore[no-untyped-call]  # noqa: SLF001
        return Loaded(pinned, self.skipped, self.items)


class Collator:
    """Makes batches of samples, and empty ones, which are cut from the first."""

    def __init__(self, collate_fn: Callable[[list[Any]], Any] | None, seeds: SampleSeeds | None) -> None:
        self._collate = collate_fn or default_collate
        self._seeds = seeds
        self._empty: Any = None

    def collate(self, samples: list[Any], epoch: int, position: int, named: Callable[[], str]) -> Any:
        """Returns the batch of samples that start at a position; `named` names them in an error."""
        if self._seeds is not None:
            self._seeds.seed_batch(epoch, position)
        try:
            batch = self._collate(samples)
        except Exception as error:
            where, source = user_line(error.__traceback__)
            raise DataError(f"{named()} do not make a batch: {reason_of(error)}, at {where}: {source}") from error
        if self._empty is None:
            self._empty = empty_like(batch, own=True)
        return batch

    @property
    def has_empty(self) -> bool:
        return self._empty is not None

    def empty(self) -> Any:
        """Returns a new empty batch: the user may change the one that he gets."""
        return empty_like(self._empty)


@dataclass(frozen=True)
class Request:
    """One micro-batch of one rank: samples `indices`, which stand in the order from position `start` on.

    One that `is_empty` has a sample all the same, and is to be cut to nothing.
    """

    epoch: int
    start: int
    indices: list[int]
    is_empty: bool = False


class Fetcher(Dataset[Any]):
    """Stands for the dataset in DataLoader: it answers a :class:`Request` with a :class:`Loaded`.

    It is sent to workers, which write what they do into `status`.
    """

    def __init__(
        self,
        dataset: Any,
        collate_fn: Callable[[list[Any]], Any] | None,
        seeds: SampleSeeds | None,
        status: WorkerStatus | None,
        *,
        skip: bool,
    ) -> None:
        self.dataset = dataset
        self._seeds = None if is_deterministic_dataset(dataset) else seeds
        batch_seeds = seeds if self._seeds is not None or collate_fn is not None else None
        self._draws = batch_seeds is not None
        self._collator = Collator(collate_fn, batch_seeds)
        self._skip = skip
        self._status = status
        self._in_bulk = getattr(dataset, "__getitems__", None) if self._seeds is None else None

    def __getitems__(self, request: Request) -> Loaded:
        worker = get_worker_info()
        if worker is None:
            with preserve_rng(HOST) if self._draws else nullcontext():
                return self._load(request, None)
        assert self._status is not None
        self._status.write(worker.id, request.start, request.start + len(request.indices))
        loaded = self._load(request, worker.id)
        self._status.clear(worker.id)
        return loaded

    def _load(self, request: Request, worker: int | None) -> Loaded:
        samples, skipped = self._samples(request, worker)
        self._write_place(worker, len(request.indices))
        if not samples:
            return Loaded(self._empty(request), () if request.is_empty else skipped)
        batch = self._collate(samples, request)
        return Loaded(empty_like(batch)) if request.is_empty else Loaded(batch, skipped)

    def _write_place(self, worker: int | None, place: int) -> None:
        if worker is not None and self._status is not None:
            self._status.write_place(worker, place)

    def _samples(self, request: Request, worker: int | None) -> tuple[list[Any], tuple[Skip, ...]]:
        if self._in_bulk is not None:
            try:
                return list(self._in_bulk(request.indices)), ()
            except Exception:  # noqa: BLE001, S110  (one by one says which it was)
                pass
        words = None if self._seeds is None else self._seeds.words(request.epoch, request.indices)
        samples: list[Any] = []
        skipped: list[Skip] = []
        for place, index in enumerate(request.indices):
            self._write_place(worker, place)
            if words is not None:
                seed_global_rngs(words[place])
            try:
                samples.append(self.dataset[index])
            except Exception as error:
                if not self._skip:
                    raise DataError(_complaint(self.dataset, index, worker, error)) from error
                skipped.append(Skip(request.start + place, index, reason_of(error)))
        return samples, tuple(skipped)

    def _collate(self, samples: list[Any], request: Request) -> Any:
        return self._collator.collate(
            samples, request.epoch, request.start, lambda: f"samples {shortened(request.indices)}"
        )

    def _empty(self, request: Request) -> Any:
        """An empty batch where no sample of the request could be loaded."""
        if not self._collator.has_empty:
            for index in range(min(_TRIES, len(self.dataset))):
                samples, _ = self._samples(Request(request.epoch, 0, [index]), None)
                if samples:
                    self._collate(samples, request)
                    break
            else:
                raise DataError(
                    f"samples {shortened(request.indices)} and the first {_TRIES} of the dataset are all bad: this is "
                    'the dataset and not a sample; on_bad_sample="raise" shows what it says'
                )
        return self._collator.empty()


def _complaint(dataset: Any, index: int, worker: int | None, error: Exception) -> str:
    by = "" if worker is None else f" by worker {worker} (process {os.getpid()})"
    where, source = user_line(error.__traceback__)
    message = f"sample {index} cannot be loaded{by}: {reason_of(error)}, at {where}: {source}"
    file = _file_of(dataset, index, error)
    return message if file is None or file in message else f"{message}; its file is {file}"


def reason_of(error: Exception) -> str:
    """Returns an exception's type and message, in one line of bounded length."""
    text = " ".join(str(error).split())
    short = text if len(text) <= LONGEST_REASON else f"{text[:LONGEST_REASON]}…"
    return f"{type(error).__name__}: {short}" if short else type(error).__name__


def _file_of(dataset: Any, index: int, error: Exception) -> str | None:
    """The file of a sample, where the exception or the dataset (as torchvision's folders do) says which it is."""
    if isinstance(getattr(error, "filename", None), str | os.PathLike):
        return os.fspath(error.filename)  # type: ignore[attr-defined]
    while isinstance(dataset, Subset):
        dataset, index = dataset.dataset, dataset.indices[index]
    for name in ("samples", "files", "paths"):
        try:
            entry = getattr(dataset, name)[index]
        except (AttributeError, TypeError, LookupError):
            continue
        first = entry[0] if isinstance(entry, tuple) and entry else entry
        if isinstance(first, str | os.PathLike):
            return os.fspath(first)
    return None


# --- loading ---------------------------------------------------------------------------------


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


def _requests(order: Order, steps: Iterable[StepPartition]) -> Iterator[Request]:
    """The batch sampler: this rank's micro-batches, in the order of `steps`."""
    for step in steps:
        for start, stop in step.micro:
            # an empty micro-batch loads the step's first sample, to be cut to nothing
            span = (start, stop) if stop > start else (step.start, step.start + 1)
            yield Request(order.epoch, span[0], order.take(*span).tolist(), is_empty=stop == start)


@dataclass(eq=False)
class Loader:
    """Loads this rank's micro-batches of a map-style dataset, on the host; `skip` leaves bad samples out."""

    dataset: Any
    settings: LoaderSettings
    skip: bool

    def load(self, order: Order, steps: Iterable[StepPartition]) -> Iterator[Loaded]:
        """Calls the dataset's `set_epoch`, where it has one, and yields a batch for every micro-batch of `steps`."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(order.epoch)
        yield from self.read(order, steps)

    def read(self, order: Order, steps: Iterable[StepPartition]) -> Iterator[Loaded]:
        """Does the same without `set_epoch`."""
        settings, status = self.settings, self.settings.worker_status()
        fetcher = Fetcher(self.dataset, settings.collate_fn, settings.sample_seeds, status, skip=self.skip)
        yield from settings.run(fetcher, order, status, batch_sampler=_requests(order, steps))


def _identity(loaded: Any) -> Any:
    return loaded
