"""From the items of a stream to batches on the host: what DataLoader iterates, in its workers or in the rank itself.

The workers of a rank take its micro-batches in turn, as they do with random access: worker w of W those whose number is
w, w + W, …, so DataLoader, which asks its workers in turn, hands them out in the order of the stream.

    known length     the steps are known: a reader takes its spans of each
    unknown          a reader reads to the end of every step of its own, so that the last one, which is short, is cut as
                     if its length had been known; it holds the items of one step
    own              the dataset splits itself: whatever comes is this rank's
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset, default_collate, get_worker_info

from samestep.data.batches import empty_like
from samestep.data.fetch import Board, Loaded, reason_of
from samestep.data.iterable import Reader, hide_worker
from samestep.data.loader import Loading
from samestep.data.order import UNKNOWN, Cut, Positions, SampleOrder, StepPartition
from samestep.data.streams import SampleSeeds, preserve_rng
from samestep.errors import DataError
from samestep.launch.failure import user_line
from samestep.topology import cut_evenly

__all__: list[str] = []


class Portion(Loaded):
    """A host batch, and how many items it says something about."""

    __slots__ = ("size",)

    def __init__(self, batch: Any, size: int) -> None:
        super().__init__(batch)
        self.size = size

    def pin_memory(self) -> Portion:
        """Returns it with its tensors in page-locked memory; DataLoader calls it."""
        return Portion(super().pin_memory().batch, self.size)


class StreamLoader:
    """Loads this rank's micro-batches of a stream, on the host.

    Args:
        dataset: has `__iter__`; `set_epoch(epoch)` is called where it has one.
        how: it loads.
    """

    skip = False  # a stream that has raised is over

    def __init__(self, dataset: Any, how: Loading) -> None:
        self.dataset = dataset
        self.how = how

    def load(self, order: Positions, steps: Sequence[StepPartition]) -> Iterator[Loaded]:
        """Yields one host batch for every micro-batch of `steps`.

        Raises:
            DataError: the stream has raised, a worker died, or there are not as many items as it said.
        """
        return self._load(order.epoch, lambda board: KnownSteps(self, order, steps, board))

    def load_to_the_end(self, epoch: int, cut: Cut, cursor: int) -> Iterator[Portion]:
        """Yields one host batch for every micro-batch from position `cursor` on, with the number of items of its step.

        Args:
            epoch: which.
            cut: of any step that is not the last.
            cursor: the position at which the first step starts.
        """
        return self._load(epoch, lambda board: UnknownSteps(self, epoch, cut, cursor, board))

    def load_own(self, epoch: int, sizes: Sequence[int]) -> Iterator[Portion]:
        """Yields batches of what this rank's own stream gives, with the number of items in each.

        Args:
            epoch: which.
            sizes: items of the micro-batches of a step.
        """
        return self._load(epoch, lambda _: OwnStream(self, sizes))

    def _load(self, epoch: int, made: Callable[[Board | None], IterableDataset[Any]]) -> Iterator[Any]:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        board = self.how.board()
        yield from self.how.run(made(board), SampleOrder(UNKNOWN, 0, epoch, shuffle=False), board, batch_size=None)


class Batches:
    """Makes batches of items, and of none an empty one."""

    def __init__(self, collate: Callable[[list[Any]], Any] | None, streams: SampleSeeds | None, epoch: int) -> None:
        self._collate = collate or default_collate
        self._streams = streams
        self._epoch = epoch
        self._empty: Any = None

    @property
    def can_be_empty(self) -> bool:
        """Whether an empty batch can be made: it is cut from an earlier one."""
        return self._empty is not None

    def of(self, items: list[Any], start: int) -> Any:
        """Returns a batch of items that start at a position."""
        if not items:
            return empty_like(self._empty)
        if self._streams is not None:
            self._streams.enter(self._epoch, start)
        try:
            batch = self._collate(items)
        except Exception as error:
            where, source = user_line(error.__traceback__)
            raise DataError(
                f"items {start} to {start + len(items) - 1} of the stream do not make a batch: {reason_of(error)}, at "
                f"{where}: {source}"
            ) from error
        if self._empty is None:
            self._empty = empty_like(batch, own=True)
        return batch


class _Stream(IterableDataset[Any], ABC):
    """What DataLoader takes for the dataset: it yields this worker's batches of one epoch."""

    def __init__(self, loader: StreamLoader, epoch: int, board: Board | None) -> None:
        self.dataset = loader.dataset
        self.epoch = epoch
        self.collate_fn = loader.how.collate_fn
        self.streams = loader.how.streams
        self.board = board

    def __iter__(self) -> Iterator[Loaded]:
        info = get_worker_info()
        worker, self.number, self.of = None, 0, 1
        if info is not None:
            worker, self.number, self.of = info.id, info.id, info.num_workers
            hide_worker()
        self.reader = Reader(self.dataset, self.epoch, streams=self.streams, worker=worker, note=self._noted(worker))
        self.batches = Batches(self.collate_fn, self.streams, self.epoch)
        produced = self._produced()
        while True:
            # the rank's own streams go on as if nothing had been loaded; in a worker nobody else draws
            with preserve_rng() if worker is None and self.streams is not None else nullcontext():
                loaded = next(produced, None)
            if worker is not None and self.board is not None:
                self.board.write(worker, None)
            if loaded is None:
                return
            yield loaded

    def _noted(self, worker: int | None) -> Callable[[int], None] | None:
        if worker is None or self.board is None:
            return None
        board = self.board
        return lambda at: board.write_row(worker, at, at + 1, 0)

    @abstractmethod
    def _produced(self) -> Iterator[Loaded]:
        """Yields the batches, each made of what `reader` gives."""

    def _mine(self, first: int, spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Returns those of a step's micro-batches that are this worker's; the first has number `first`."""
        return [span for place, span in enumerate(spans) if (first + place) % self.of == self.number]

    def _cut_from(self, items: list[Any], start: int, spans: Sequence[tuple[int, int]]) -> Iterator[Any]:
        """Yields a batch for each of `spans`, out of items that start at a position."""
        if items and not self.batches.can_be_empty:
            self.batches.of(items[:1], start)
        for low, high in spans:
            yield self.batches.of(items[low - start : high - start], low)


class KnownSteps(_Stream):
    """The micro-batches of steps that are known."""

    def __init__(
        self, loader: StreamLoader, order: Positions, steps: Sequence[StepPartition], board: Board | None
    ) -> None:
        super().__init__(loader, order.epoch, board)
        self.total = order.size
        self.steps = steps

    def _produced(self) -> Iterator[Loaded]:
        first = 0
        for step in self.steps:
            mine = self._mine(first, step.micro)
            first += len(step.micro)
            if mine:
                yield from map(Loaded, self._batches(step, mine))

    def _batches(self, step: StepPartition, spans: list[tuple[int, int]]) -> Iterator[Any]:
        """One reading takes what lies between the first and the last item that is needed; a seek takes no more."""
        real = [span for span in spans if span[1] > span[0]]
        if not real and not self.batches.can_be_empty:
            real = [(step.start, step.start + 1)]
        if hasattr(self.dataset, "iter_from") and len(real) > 1:
            for span in spans:
                yield from self._batches(step, [span])
            return
        start, stop = min((span[0] for span in real), default=0), max((span[1] for span in real), default=0)
        items = self.reader.take(start, stop) if real else []
        if len(items) < stop - start:
            raise DataError(f"{self._said()} and gave {self.reader.at}: its length must be what one epoch gives")
        if self.reader.at == self.total and self.reader.skip(self.total + 1) > self.total:
            raise DataError(f"{self._said()} and gave more: its length must be what one epoch gives")
        yield from self._cut_from(items, start, spans)

    def _said(self) -> str:
        return f"{type(self.dataset).__name__} said that it has {self.total} items"


class UnknownSteps(_Stream):
    """The micro-batches of steps of which the last is the one in which the stream ends."""

    def __init__(self, loader: StreamLoader, epoch: int, cut: Cut, cursor: int, board: Board | None) -> None:
        super().__init__(loader, epoch, board)
        self.cut = cut
        self.cursor = cursor

    def _produced(self) -> Iterator[Loaded]:
        start, first, size = self.cursor, 0, self.cut.batch_size
        whole = self.cut.step(start)
        while True:
            items = self._read(start, needed=bool(self._mine(first, whole.micro)))
            count = self.reader.at - start
            if count <= 0 or (count < size and self.cut.drop_last):
                return
            spans = step_of(self.cut, start, count).micro
            for batch in self._cut_from(items, start, self._mine(first, spans)):
                yield Portion(batch, count)
            if count < size:
                return
            start, first = start + size, first + len(spans)

    def _read(self, start: int, *, needed: bool) -> list[Any]:
        """The items of a step; none where no micro-batch of it can be this worker's."""
        if needed or start == self.cursor:  # else where the stream stands would not be known
            return self.reader.take(start, start + self.cut.batch_size)
        self.reader.skip(start + self.cut.batch_size)
        return []


def step_of(cut: Cut, start: int, count: int) -> StepPartition:
    """Returns the step of `count` items that starts at a position."""
    return replace(cut, total=start + count, drop_last=False).step(start)


class OwnStream(IterableDataset[Any]):
    """What this rank's own stream gives, in this worker."""

    def __init__(self, loader: StreamLoader, sizes: Sequence[int]) -> None:
        self.dataset = loader.dataset
        self.collate_fn = loader.how.collate_fn
        self.sizes = sizes

    def __iter__(self) -> Iterator[Portion]:
        info = get_worker_info()
        number, workers = (0, 1) if info is None else (info.id, info.num_workers)
        items = iter(self.dataset)
        batches, at = Batches(self.collate_fn, None, 0), 0
        while True:
            size = self.sizes[number % len(self.sizes)]
            taken = list(islice(items, size))
            if taken:
                yield Portion(batches.of(taken, at), len(taken))
            if len(taken) < size:
                return
            number, at = number + workers, at + size


def own_sizes(batch_size: int, micro_batch_size: int | None, rank: int, ranks: int) -> list[int]:
    """Returns the items of each micro-batch of a whole step on one rank, as many micro-batches on each.

    >>> own_sizes(10, 2, rank=2, ranks=3)
    [2, 1]
    """
    largest = -(-batch_size // ranks)
    count = -(-largest // micro_batch_size) if micro_batch_size else 1
    start, stop = cut_evenly(batch_size, ranks)[rank]
    return [high - low for low, high in cut_evenly(stop - start, count)]
