"""From the numbers of a micro-batch's samples to the batch, in a worker or in the rank itself.

torch's fetcher is three lines: what a sample raises goes up through two processes as a page of tracebacks, and does not
say which sample it was. Here every sample is loaded under its own random stream and by its own name:

    sample 17 cannot be loaded by worker 1 (process 4242): ValueError: not a picture, at data.py:31: "raise Value…"

or, if asked, left out and noted down. A micro-batch of which nothing is left becomes an empty one, cut from another
sample so that every other dim and dtype is right.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset, Subset, default_collate, get_worker_info

from samestep.data.batches import empty_like
from samestep.data.ledger import Skip
from samestep.data.streams import SampleSeeds, is_deterministic_dataset, preserve_rng, seed_global_rngs
from samestep.errors import DataError
from samestep.launch.failure import user_line

__all__: list[str] = []

LONGEST_REASON = 200  # characters of an exception's message that the ledger keeps
_TRIES = 64  # samples tried until one can be loaded, to cut an empty batch from


@dataclass(frozen=True)
class Request:
    """One micro-batch of one rank: samples `indices`, which stand in the order from position `start` on.

    One that `is_empty` has a sample all the same, and is to be cut to nothing.
    """

    epoch: int
    start: int
    indices: list[int]
    is_empty: bool = False


class Loaded:
    """A host batch of samples `request.indices` without those at `skipped`."""

    __slots__ = ("batch", "skipped")

    def __init__(self, batch: Any, skipped: tuple[Skip, ...] = ()) -> None:
        self.batch = batch
        self.skipped = skipped

    def pin_memory(self) -> Loaded:
        """Returns it with its tensors in page-locked memory; DataLoader calls it."""
        pinned = torch.utils.data._utils.pin_memory.pin_memory(self.batch)  # type: ignore[no-untyped-call]  # noqa: SLF001
        return Loaded(pinned, self.skipped)


class Board:
    """Where every worker stands, in memory shared with the rank: it is read when a worker has died.

    A row is [first position of the micro-batch, one past its last, place in it of the sample that is being loaded].
    The place is -1 where all are loaded at once, and the number of samples when they are made into a batch.
    """

    def __init__(self, workers: int) -> None:
        self._shared = torch.full((workers, 3), -1, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    @cached_property
    def _rows(self) -> NDArray[np.int64]:
        rows: NDArray[np.int64] = self._shared.numpy()  # a write takes 0.1 us, to a tensor 3
        return rows

    def __getstate__(self) -> dict[str, Any]:
        return {"_shared": self._shared}  # for a worker that is spawned: the view would be copied

    def write(self, worker: int, request: Request | None) -> None:
        """Says what a worker is at from now on; None while it has nothing to do."""
        self._rows[worker] = (
            (-1, -1, -1) if request is None else (request.start, request.start + len(request.indices), -1)
        )

    def write_row(self, worker: int, start: int, stop: int, place: int) -> None:
        """Says it in numbers."""
        self._rows[worker] = (start, stop, place)

    def note_place(self, worker: int, place: int) -> None:
        """Says which sample a worker is at."""
        self._rows[worker, 2] = place

    def read(self, worker: int) -> tuple[int, int, int]:
        """Returns a worker's row."""
        start, stop, place = self._rows[worker].tolist()
        return start, stop, place


class Fetcher(Dataset[Any]):
    """What DataLoader takes for the dataset: it answers a :class:`Request` with a :class:`Loaded`.

    Args:
        dataset: the user's.
        collate_fn: makes a batch of a list of samples; torch's default if None.
        streams: of the samples; None leaves the generators alone.
        skip: leave bad samples out.
        board: where workers say what they are at; None without workers.
    """

    def __init__(
        self,
        dataset: Any,
        collate_fn: Callable[[list[Any]], Any] | None,
        *,
        streams: SampleSeeds | None,
        skip: bool,
        board: Board | None,
    ) -> None:
        self.dataset = dataset
        self._collate = collate_fn or default_collate
        self._streams = None if is_deterministic_dataset(dataset) else streams
        self._batch_stream = streams if self._streams is not None or collate_fn is not None else None
        self._skip = skip
        self._board = board
        self._in_bulk = getattr(dataset, "__getitems__", None) if self._streams is None else None
        self._empty: Any = None  # cut from the first batch: what is left where nothing is

    def __getitems__(self, request: Request) -> Loaded:
        """Loads one micro-batch; DataLoader calls it, once for each."""
        worker = get_worker_info()
        if worker is None:
            with preserve_rng() if self._batch_stream is not None else nullcontext():
                return self._loaded(request, None)
        assert self._board is not None
        self._board.write(worker.id, request)
        loaded = self._loaded(request, worker.id)
        self._board.write(worker.id, None)
        return loaded

    def _loaded(self, request: Request, worker: int | None) -> Loaded:
        samples, skipped = self._samples(request, worker)
        self._note_place(worker, len(request.indices))
        if request.is_empty:
            return Loaded(empty_like(self._collated(samples, request)) if samples else self._nothing(request))
        if not samples:
            return Loaded(self._nothing(request), skipped)
        batch = self._collated(samples, request)
        if self._skip and self._empty is None:
            self._empty = empty_like(batch, own=True)
        return Loaded(batch, skipped)

    def _note_place(self, worker: int | None, place: int) -> None:
        if worker is not None and self._board is not None:
            self._board.note_place(worker, place)

    def _samples(self, request: Request, worker: int | None) -> tuple[list[Any], tuple[Skip, ...]]:
        if self._in_bulk is not None:
            try:
                return list(self._in_bulk(request.indices)), ()
            except Exception:  # noqa: BLE001, S110  (one by one says which it was)
                pass
        words = None if self._streams is None else self._streams.words(request.epoch, request.indices)
        samples: list[Any] = []
        skipped: list[Skip] = []
        for place, index in enumerate(request.indices):
            self._note_place(worker, place)
            if words is not None:
                seed_global_rngs(words[place])
            try:
                samples.append(self.dataset[index])
            except Exception as error:
                if not self._skip:
                    raise DataError(_complaint(self.dataset, index, worker, error)) from error
                skipped.append(Skip(request.start + place, index, reason_of(error)))
        return samples, tuple(skipped)

    def _collated(self, samples: list[Any], request: Request) -> Any:
        if self._batch_stream is not None:
            self._batch_stream.enter(request.epoch, request.start)
        try:
            return self._collate(samples)
        except Exception as error:
            where, source = user_line(error.__traceback__)
            raise DataError(
                f"samples {shortened(request.indices)} do not make a batch: {reason_of(error)}, at {where}: {source}"
            ) from error

    def _nothing(self, request: Request) -> Any:
        """An empty batch where no sample of the request could be loaded."""
        if self._empty is None:
            for index in range(min(_TRIES, len(self.dataset))):
                samples, _ = self._samples(Request(request.epoch, 0, [index]), None)
                if samples:
                    self._empty = empty_like(self._collated(samples, request), own=True)
                    break
            else:
                raise DataError(
                    f"samples {shortened(request.indices)} and the first {_TRIES} of the dataset are all bad: this is "
                    'the dataset and not a sample; on_bad_sample="raise" shows what it says'
                )
        return empty_like(self._empty)  # the user may change what he gets


def shortened(indices: list[int], most: int = 16) -> str:
    """Returns a list of samples for an error message.

    >>> shortened([1, 2, 3], most=2)
    '[1, 2, … 3 in all]'
    """
    if len(indices) <= most:
        return str(indices)
    return f"{str(indices[:most])[:-1]}, … {len(indices)} in all]"


def _complaint(dataset: Any, index: int, worker: int | None, error: Exception) -> str:
    by = "" if worker is None else f" by worker {worker} (process {os.getpid()})"
    where, source = user_line(error.__traceback__)
    message = f"sample {index} cannot be loaded{by}: {reason_of(error)}, at {where}: {source}"
    file = _file_of(dataset, index, error)
    return message if file is None or file in message else f"{message}; its file is {file}"


def reason_of(error: Exception) -> str:
    """Returns what an exception says, in one line of a bearable length."""
    said = " ".join(str(error).split())
    short = said if len(said) <= LONGEST_REASON else f"{said[:LONGEST_REASON]}…"
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
