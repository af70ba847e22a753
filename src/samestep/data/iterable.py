"""Datasets that can only be iterated: read at the positions that a rank needs, and made into batches.

torch hands an IterableDataset to every worker of every rank: a dataset that is not split by hand is trained on as many
times as there are readers, and ranks whose shares are unequal wait for each other for ever. Here the items have
positions, and a step is a slice of them, as it is of a dataset with random access. A reader that can seek goes to its
position: `dataset.iter_from(position)`; another reads the whole stream and keeps its own. A reader must see the stream
whole, so a dataset that asks torch for its worker gets none. The workers of a rank take its micro-batches in turn, as
DataLoader asks them in turn, so batches come in the order of the stream.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from samestep.data.loader import (
    Collator,
    Loaded,
    LoaderSettings,
    SampleSeeds,
    reason_of,
    seed_global_rngs,
)
from samestep.data.order import UNKNOWN, SampleOrder, StepPartition, StepPartitioner
from samestep.data.workers import WorkerStatus
from samestep.errors import DataError
from samestep.launch.rank.user_code import user_line
from samestep.runtime.digest import bytes_of
from samestep.runtime.exchange import all_gather_json, raise_on_all_ranks
from samestep.runtime.rng import HOST, preserve_rng
from samestep.runtime.world import World
from samestep.topology import cut_evenly

Kind = Literal["indexed", "seeks", "repeats", "own", "stateful"]

PROMISES: dict[str, str] = {
    "indexed": "every sample exactly once an epoch, on any number of ranks and workers; a resume goes on behind the "
    "last committed step",
    "seeks": "every item exactly once an epoch, on any number of ranks and workers; a resume goes on behind the last "
    "committed step, through iter_from",
    "repeats": "every item exactly once an epoch, on any number of ranks and workers, if the stream gives the same "
    "items each time it is iterated; every rank and worker reads all of it, and a resume reads up to where it stood",
    "own": "every rank trains on what its own stream gives, and an epoch ends on all ranks at the same step, when all "
    "streams have; which items these are is up to the dataset. A resume on as many ranks and workers, in steps of the "
    "same size, reads up to where it stood; else it begins the epoch anew",
    "stateful": "every rank trains on what its own loader gives, and an epoch ends on all ranks at the same step, when "
    "all loaders have; a resume on as many ranks goes on from every loader's own state, on others it begins the epoch "
    "anew",
}
_BLOCK = 1024  # items whose seeds are computed together
_END = object()


# --- kinds of data ---------------------------------------------------------------------------


def inspect_dataset(dataset: Any, *, splits_itself: bool) -> tuple[Kind, int]:
    """Returns how a dataset can be read, and its length; UNKNOWN where it has none."""
    name = type(dataset).__name__
    if isinstance(dataset, DataLoader):
        if hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict"):
            return "stateful", UNKNOWN
        raise DataError(
            "shards takes the dataset, not a DataLoader: samestep.shards(loader.dataset, world, batch_size=…, "
            "workers=…, collate_fn=…)"
        )
    if not _is_iterable_only(dataset):
        if splits_itself:
            raise DataError(f"{name} has random access: shards splits it, so leave splits_itself out")
        return "indexed", _checked_length(dataset, name)
    if iter_is_once(dataset):
        raise DataError(
            f"a {name} can be iterated once, and every epoch and worker needs a beginning: give an object whose "
            "__iter__ returns a new iterator"
        )
    if splits_itself:
        return "own", UNKNOWN
    length = dataset_length(dataset)
    if length is None:
        return "repeats", UNKNOWN
    return "seeks" if hasattr(dataset, "iter_from") else "repeats", length


def _is_iterable_only(dataset: Any) -> bool:
    if isinstance(dataset, IterableDataset):
        return True
    getter = getattr(type(dataset), "__getitem__", None)
    return hasattr(dataset, "__iter__") and (getter is None or getter is Dataset.__getitem__)


def iter_is_once(dataset: Any) -> bool:
    """Whether it is an iterator, or gives the same one each time: what was taken from it is gone."""
    if isinstance(dataset, Iterator):
        return True
    one, other = iter(dataset), iter(dataset)
    return one is other


def _checked_length(dataset: Any, name: str) -> int:
    if not hasattr(dataset, "__getitem__"):
        raise DataError(
            f"{name} has no random access (an iterable dataset?): shards cuts one global order, so the dataset needs "
            "__len__ and __getitem__"
        )
    try:
        return len(dataset)
    except (TypeError, NotImplementedError) as error:
        raise DataError(f"{name} has no length: shards needs __len__, to know where an epoch ends") from error


def dataset_length(dataset: Any) -> int | None:
    """Returns how many items a stream says it has; None if it does not say."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError, AttributeError):  # the ways in which datasets say that they do not know
        return None


def compare_first_items(dataset: Any, world: World, seeds: SampleSeeds | None) -> None:
    """Reads one item, and refuses a stream that is not the same on every rank. Collective: every rank must call it.

    One that splits itself by rank, unasked, would else be split twice, and most of it never read.
    """
    if world.data.size == 1:
        return
    problem, mark = None, ""
    try:
        with preserve_rng(HOST):
            mark = fingerprint(Reader(dataset, 0, seeds).take(0, 1))
    except DataError as error:
        problem = error
    raise_on_all_ranks(world.data, problem)
    marks = all_gather_json(world.data, mark)
    if len(set(marks)) > 1:
        other = next(rank for rank, theirs in enumerate(marks) if theirs != marks[0])
        raise DataError(
            f"the first item of {type(dataset).__name__} on rank {world.data.ranks[other]} is not that on rank "
            f"{world.data.ranks[0]}: shards splits the stream, so it must be the same on every rank. A dataset that "
            "gives each rank and worker its own part needs splits_itself=True; one that draws from a generator of its "
            "own must seed it"
        )


def fingerprint(item: Any) -> str:
    """Returns a digest of what can be compared in an item: its tensors, arrays, numbers and texts.

    >>> fingerprint([1, "a"]) == fingerprint([1, "a"]) != fingerprint([2, "a"])
    True
    """
    digest = hashlib.blake2b(digest_size=8)
    _feed(digest, item)
    return digest.hexdigest()


def _feed(digest: hashlib.blake2b, item: Any) -> None:
    if isinstance(item, torch.Tensor) and item.layout == torch.strided and not item.is_quantized:
        digest.update(bytes_of(item.cpu()).numpy().data)
    elif isinstance(item, np.ndarray) and item.dtype.kind in "biufcSU":
        digest.update(item.tobytes())
    elif isinstance(item, Mapping):
        for key, value in item.items():
            _feed(digest, key)
            _feed(digest, value)
    elif isinstance(item, list | tuple):
        for value in item:
            _feed(digest, value)
    elif isinstance(item, bool | int | float | str | bytes | np.generic):
        digest.update(repr(item).encode())
    else:
        digest.update(type(item).__name__.encode())


# --- reading ---------------------------------------------------------------------------------


@dataclass(eq=False)
class Reader:
    """Takes items at rising positions from one epoch of a stream."""

    dataset: Any
    epoch: int
    seeds: SampleSeeds | None
    worker: int | None = None
    on_read: Callable[[int], None] | None = None
    position: int = 0  # of the next item
    _iterator: Iterator[Any] | None = None

    def take(self, start: int, stop: int) -> list[Any]:
        """Returns the items at positions [start, stop), or fewer if the stream ends there."""
        self._go_to(start)
        return list(self._items(stop))

    def skip(self, stop: int) -> int:
        """Reads up to position `stop`, or to the end, and returns where that is."""
        self._go_to(self.position)
        for _ in self._items(stop):
            pass
        return self.position

    def _go_to(self, start: int) -> None:
        if self._iterator is not None and self.position == start:
            return
        if self.seeds is not None:
            self.seeds.seed_batch(self.epoch, 0)
        if hasattr(self.dataset, "iter_from"):
            self._iterator = self._open(lambda: iter(self.dataset.iter_from(start)))
            self.position = start
            return
        if self._iterator is None:
            self._iterator = self._open(lambda: iter(self.dataset))
        assert self.position <= start, "a stream is not read backwards"
        for _ in self._items(start):
            pass

    def _items(self, stop: int) -> Iterator[Any]:
        words: list[int] = []
        first = self.position
        while self.position < stop:
            if self.seeds is not None:
                if self.position == first + len(words):
                    first = self.position
                    words = self.seeds.words(self.epoch, list(range(first, min(first + _BLOCK, stop))))
                seed_global_rngs(words[self.position - first])
            if self.on_read is not None:
                self.on_read(self.position)
            item = self._next()
            if item is _END:
                return
            self.position += 1
            yield item

    def _open(self, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        try:
            return begin()
        except Exception as error:
            raise DataError(self._complaint("cannot be iterated", error)) from error

    def _next(self) -> Any:
        assert self._iterator is not None
        try:
            return next(self._iterator, _END)
        except Exception as error:
            raise DataError(self._complaint(f"cannot give item {self.position}", error)) from error

    def _complaint(self, what: str, error: Exception) -> str:
        by = "" if self.worker is None else f" to worker {self.worker} (process {os.getpid()})"
        where, source = user_line(error.__traceback__)
        return f"{type(self.dataset).__name__} {what}{by}: {reason_of(error)}, at {where}: {source}"


# --- loading ---------------------------------------------------------------------------------


@dataclass(eq=False)
class StreamLoader:
    """Loads this rank's micro-batches of a stream, on the host."""

    dataset: Any
    settings: LoaderSettings
    skip = False  # a stream that has raised is over

    def load(self, epoch: int, partitioner: StepPartitioner, cursor: int) -> Iterator[Loaded]:
        """Yields one batch for every micro-batch from position `cursor` on, with the items of its step.

        The partitioner is that of any step that is not the last, where the length is UNKNOWN.
        """
        collate_fn, seeds = self.settings.collate_fn, self.settings.sample_seeds
        return self._load(
            epoch, lambda status: SharedStream(self.dataset, collate_fn, seeds, epoch, partitioner, cursor, status)
        )

    def load_own(self, epoch: int, sizes: Sequence[int]) -> Iterator[Loaded]:
        """Yields batches of this rank's own stream, in micro-batches of these sizes, with the items of each."""
        return self._load(epoch, lambda _: OwnStream(self.dataset, self.settings.collate_fn, sizes))

    def _load(self, epoch: int, make: Callable[[WorkerStatus | None], IterableDataset[Any]]) -> Iterator[Any]:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        status = self.settings.worker_status()
        order = SampleOrder(UNKNOWN, 0, epoch, shuffle=False)
        yield from self.settings.run(make(status), order, status, batch_size=None)


@dataclass(eq=False)
class SharedStream(IterableDataset[Any]):
    """Stands for the dataset in DataLoader: yields this worker's batches of a stream that all ranks read.

    Where the length is known, a worker reads the items that it needs. Else it reads to the end of every step, so that
    the last one, which is short, is divided as if its length had been known; it holds the items of one step.
    """

    dataset: Any
    collate_fn: Callable[[list[Any]], Any] | None
    seeds: SampleSeeds | None
    epoch: int
    partitioner: StepPartitioner
    cursor: int
    status: WorkerStatus | None

    def __iter__(self) -> Iterator[Loaded]:
        info = get_worker_info()
        worker, self.number, self.workers = None, 0, 1
        if info is not None:
            worker, self.number, self.workers = info.id, info.id, info.num_workers
            torch_worker._worker_info = None  # noqa: SLF001  (so that the dataset sees no worker, and gives all)
        self.reader = Reader(self.dataset, self.epoch, self.seeds, worker, self._on_read(worker))
        self.collator = Collator(self.collate_fn, self.seeds)
        produced = self._produce()
        while True:
            # the rank's own streams go on as if nothing had been loaded; in a worker nothing else draws
            with preserve_rng(HOST) if worker is None and self.seeds is not None else nullcontext():
                loaded = next(produced, None)
            if worker is not None and self.status is not None:
                self.status.clear(worker)
            if loaded is None:
                return
            yield loaded

    def _on_read(self, worker: int | None) -> Callable[[int], None] | None:
        if worker is None or self.status is None:
            return None
        status = self.status
        return lambda position: status.write(worker, position, position + 1, 0)

    def _produce(self) -> Iterator[Loaded]:
        start, first, is_known = self.cursor, 0, self.partitioner.total < UNKNOWN  # `first` counts micro-batches
        while start < self.partitioner.end:
            step = self.partitioner.step(start)
            mine = self._mine(first, step.micro)
            if is_known:
                for batch in self._needed_batches(step, mine):
                    yield Loaded(batch)
            else:
                items = self._read_to_end(step, needed=bool(mine))
                count = self.reader.position - start
                if count <= 0 or (count < step.size and self.partitioner.drop_last):
                    return
                found = step if count == step.size else step_of(self.partitioner, start, count)
                for batch in self._batches(items, start, self._mine(first, found.micro)):
                    yield Loaded(batch, items=count)
                if count < step.size:
                    return
            start, first = step.stop, first + len(step.micro)

    def _mine(self, first: int, spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Returns those of a step's micro-batches that are this worker's; the first has number `first`."""
        return [span for place, span in enumerate(spans) if (first + place) % self.workers == self.number]

    def _batches(self, items: list[Any], start: int, spans: Sequence[tuple[int, int]]) -> Iterator[Any]:
        """Yields a batch for each of `spans`, out of items that start at a position."""
        if items and not self.collator.has_empty:
            self._batch(items[:1], start)
        for low, high in spans:
            part = items[low - start : high - start]
            yield self._batch(part, low) if part else self.collator.empty()

    def _batch(self, items: list[Any], start: int) -> Any:
        name = f"items {start} to {start + len(items) - 1} of the stream"
        return self.collator.collate(items, self.epoch, start, lambda: name)

    def _needed_batches(self, step: StepPartition, spans: list[tuple[int, int]]) -> Iterator[Any]:
        """One reading takes the items between the first and the last that is needed; a seek takes no more."""
        if not spans:
            return
        real = [span for span in spans if span[1] > span[0]]
        if not real and not self.collator.has_empty:
            real = [(step.start, step.start + 1)]
        if hasattr(self.dataset, "iter_from") and len(real) > 1:
            for span in spans:
                yield from self._needed_batches(step, [span])
            return
        start, stop = min((span[0] for span in real), default=0), max((span[1] for span in real), default=0)
        items = self.reader.take(start, stop) if real else []
        total, length = self.partitioner.total, f"{type(self.dataset).__name__} said that it has "
        if len(items) < stop - start:
            raise DataError(
                f"{length}{total} items and gave {self.reader.position}: its length must be what one epoch gives"
            )
        if self.reader.position == total and self.reader.skip(total + 1) > total:
            raise DataError(f"{length}{total} items and gave more: its length must be what one epoch gives")
        yield from self._batches(items, start, spans)

    def _read_to_end(self, step: StepPartition, *, needed: bool) -> list[Any]:
        """Reads a step; returns its items, or none where no micro-batch of it can be this worker's."""
        if needed or step.start == self.cursor:  # else the reader's position would not be known
            return self.reader.take(step.start, step.stop)
        self.reader.skip(step.stop)
        return []


def step_of(partitioner: StepPartitioner, start: int, count: int) -> StepPartition:
    return replace(partitioner, total=start + count, drop_last=False).step(start)


@dataclass(eq=False)
class OwnStream(IterableDataset[Any]):
    """Stands for the dataset in DataLoader: yields the batches of this rank's own stream, in this worker."""

    dataset: Any
    collate_fn: Callable[[list[Any]], Any] | None
    sizes: Sequence[int]

    def __iter__(self) -> Iterator[Loaded]:
        info = get_worker_info()
        number, workers = (0, 1) if info is None else (info.id, info.num_workers)
        collator, items, start = Collator(self.collate_fn, None), iter(self.dataset), 0
        while True:
            size = self.sizes[number % len(self.sizes)]
            taken = list(islice(items, size))
            if taken:
                name = f"items {start} to {start + len(taken) - 1} of the stream"
                yield Loaded(collator.collate(taken, 0, start, lambda name=name: name), items=len(taken))  # type: ignore[misc]
            if len(taken) < size:
                return
            number, start = number + workers, start + size


def own_sizes(batch_size: int, micro_batch_size: int | None, rank: int, ranks: int) -> list[int]:
    """Returns the items of each micro-batch of a whole step on one rank, as many micro-batches on each.

    >>> own_sizes(10, 2, rank=2, ranks=3)
    [2, 1]
    """
    largest = -(-batch_size // ranks)
    count = -(-largest // micro_batch_size) if micro_batch_size else 1
    start, stop = cut_evenly(batch_size, ranks)[rank]
    return [high - low for low, high in cut_evenly(stop - start, count)]
