"""Datasets that can only be iterated: read at the positions that a rank needs, with what can be promised of each kind.

torch hands an IterableDataset to every worker of every rank, and whoever does not split it by hand trains on each item
as many times as there are readers; ranks whose shares are unequal wait for each other for ever. Here the items of the
stream have positions, and a step is a slice of them, as it is of a dataset with random access:

    stream       a b c d e f g h i j         batch_size=4, 2 ranks
    step         └─ 0 ─┘ └─ 1 ─┘ └2┘         item k belongs to step k // 4, whoever reads it
    rank 0       a b     e f     i           a reader that can seek goes there: dataset.iter_from(position)
    rank 1           c d     g h   j         another reads the whole stream and keeps its own

A reader must see the stream whole, so a dataset that asks torch for its worker is told that there is none.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data._utils import worker as torch_worker

from samestep.data.fetch import reason_of
from samestep.data.streams import SampleSeeds, preserve_rng, seed_global_rngs
from samestep.errors import DataError
from samestep.launch.failure import user_line
from samestep.runtime.digest import bytes_of
from samestep.runtime.exchange import all_gather_json, raise_on_all_ranks
from samestep.runtime.world import World

__all__: list[str] = []

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


def kind_of(dataset: Any, *, splits_itself: bool) -> Kind:
    """Returns how a dataset can be read.

    Raises:
        DataError: it cannot, or the arguments contradict it.
    """
    name = type(dataset).__name__
    if isinstance(dataset, DataLoader):
        if hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict"):
            return "stateful"
        return "indexed"  # refused there, with advice
    if not _is_iterable_only(dataset):
        if splits_itself:
            raise DataError(f"{name} has random access: shards splits it, so leave splits_itself out")
        return "indexed"
    if iter_is_once(dataset):
        raise DataError(
            f"a {name} can be iterated once, and every epoch and worker needs a beginning: give an object whose "
            "__iter__ returns a new iterator"
        )
    if splits_itself:
        return "own"
    return "seeks" if hasattr(dataset, "iter_from") and dataset_length(dataset) is not None else "repeats"


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


def dataset_length(dataset: Any) -> int | None:
    """Returns how many items a stream says it has; None if it does not say."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError, AttributeError):  # the ways in which datasets say that they do not know
        return None


def hide_worker() -> None:
    """Lets `get_worker_info` return None in this worker from now on."""
    torch_worker._worker_info = None  # noqa: SLF001


def compare_first_items(dataset: Any, world: World, streams: SampleSeeds | None) -> None:
    """Reads one item, and refuses a stream that is not the same on every rank. Collective: every rank must call it.

    One that splits itself by rank, unasked, would else be split twice, and most of it never read.

    Raises:
        DataError: the items differ, or this rank's cannot be read.
        PeerError: another rank's cannot.
    """
    if world.data.size == 1:
        return
    problem, mark = None, ""
    try:
        with preserve_rng():
            mark = fingerprint(Reader(dataset, 0, streams=streams).take(0, 1))
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


class Reader:
    """Takes items at rising positions from one epoch of a stream.

    Args:
        dataset: has `__iter__`, and perhaps `iter_from(position)`.
        epoch: of which the items are.
        streams: of the items; None leaves the random generators alone.
        worker: in which it reads; None in the rank itself.
        note: is told every position before it is read.

    Attributes:
        at: the position of the next item.
    """

    def __init__(
        self,
        dataset: Any,
        epoch: int,
        *,
        streams: SampleSeeds | None,
        worker: int | None = None,
        note: Callable[[int], None] | None = None,
    ) -> None:
        self.at = 0
        self._dataset = dataset
        self._epoch = epoch
        self._streams = streams
        self._worker = worker
        self._note = note
        self._iterator: Iterator[Any] | None = None
        self._seeks = hasattr(dataset, "iter_from")

    def take(self, start: int, stop: int) -> list[Any]:
        """Returns the items at positions [start, stop), or fewer if the stream ends there.

        Raises:
            DataError: the stream raised; says at which item and where.
        """
        self._go_to(start)
        return list(self._items(stop))

    def skip(self, stop: int) -> int:
        """Reads up to position `stop`, or to the end, and returns where that is."""
        self._go_to(self.at)
        for _ in self._items(stop):
            pass
        return self.at

    def _go_to(self, start: int) -> None:
        if self._iterator is not None and self.at == start:
            return
        if self._streams is not None:
            self._streams.enter(self._epoch, 0)
        if self._seeks:
            self._iterator = self._opened(lambda: iter(self._dataset.iter_from(start)))
            self.at = start
            return
        if self._iterator is None:
            self._iterator = self._opened(lambda: iter(self._dataset))
        assert self.at <= start, "a stream is not read backwards"
        for _ in self._items(start):
            pass

    def _items(self, stop: int) -> Iterator[Any]:
        words: list[int] = []
        first = self.at
        while self.at < stop:
            if self._streams is not None:
                if self.at == first + len(words):
                    first = self.at
                    words = self._streams.words(self._epoch, list(range(first, min(first + _BLOCK, stop))))
                seed_global_rngs(words[self.at - first])
            if self._note is not None:
                self._note(self.at)
            item = self._next()
            if item is _END:
                return
            self.at += 1
            yield item

    def _opened(self, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        try:
            return begin()
        except Exception as error:
            raise DataError(self._complaint("cannot be iterated", error)) from error

    def _next(self) -> Any:
        assert self._iterator is not None
        try:
            return next(self._iterator, _END)
        except Exception as error:
            raise DataError(self._complaint(f"cannot give item {self.at}", error)) from error

    def _complaint(self, what: str, error: Exception) -> str:
        by = "" if self._worker is None else f" to worker {self._worker} (process {os.getpid()})"
        where, source = user_line(error.__traceback__)
        return f"{type(self._dataset).__name__} {what}{by}: {reason_of(error)}, at {where}: {source}"
