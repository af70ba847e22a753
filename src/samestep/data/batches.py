"""From positions in the order to tensors on the device: torch's DataLoader, fed with our cut.

DataLoader's workers, collation and pinning are kept; its samplers are not (see `order`). A rank without samples in a
micro-batch gets an empty batch, dim 0 is 0, cut from a real one so that every other dim and dtype is right.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from samestep.data.order import Order, Step
from samestep.errors import DataError, SamestepError

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
    """The batch sampler: this rank's micro-batches as lists of samples, in the order of `steps`."""

    order: Order
    steps: Sequence[Step]

    def __iter__(self) -> Iterator[list[int]]:
        for step in self.steps:
            for start, stop in step.micro:
                # an empty micro-batch loads the step's first sample, to be cut to nothing by `empty_like`
                span = (start, stop) if stop > start else (step.start, step.start + 1)
                yield self.order.take(*span).tolist()


class Loader:
    """Loads this rank's micro-batches, on the host.

    Args:
        dataset: map-style; `set_epoch(epoch)` is called where it has one.
        workers: processes that load; 0 loads in this one.
        collate_fn: makes a batch of a list of samples; torch's default otherwise.
        pin_memory: page-locked memory, from which a GPU copies beside its computation.
        seeded: returns the generator that an epoch's worker seeds come from.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        workers: int,
        collate_fn: Callable[[list[Any]], Any] | None,
        pin_memory: bool,
        seeded: Callable[[int], torch.Generator],
    ) -> None:
        self.dataset = dataset
        self.workers = workers
        self.collate_fn = collate_fn
        self.pin_memory = pin_memory
        self.seeded = seeded

    def load(self, order: Order, steps: Sequence[Step]) -> Iterator[Any]:
        """Yields one host batch for every micro-batch of `steps`."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(order.epoch)
        loader: DataLoader[Any] = DataLoader(
            self.dataset,
            batch_sampler=_MicroBatches(order, steps),
            num_workers=self.workers,
            collate_fn=self.collate_fn,
            pin_memory=self.pin_memory,
            generator=self.seeded(order.epoch),
            worker_init_fn=_shield,
        )
        spans = (span for step in steps for span in step.micro)
        for (start, stop), batch in zip(spans, _unwrapped(loader), strict=True):
            yield batch if stop > start else empty_like(batch)


def _shield(worker: int) -> None:  # noqa: ARG001  (what torch calls it with)
    """Makes a worker outlive the signal with which a scheduler asks every process of a job to make room.

    torch lets SIGTERM end it, and the rank with it, before the rank could save. Its own rank it obeys, as torch's
    workers do: multiprocessing waits at the exit for what it has told to end.
    """
    numbers = {signal.SIGTERM, signal.SIGUSR1}
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    threading.Thread(target=_obey, args=(numbers, os.getppid()), daemon=True).start()


def _obey(numbers: set[signal.Signals], rank: int) -> None:
    """Ends this process when the rank, and nobody else, tells it to; handlers of python's are not told who did."""
    while True:
        told = signal.sigwaitinfo(numbers)
        if told.si_signo == signal.SIGTERM and told.si_pid == rank:
            os._exit(0)


def _unwrapped(loader: DataLoader[Any]) -> Iterator[Any]:
    """Yields the loader's batches; an error of ours from a worker loses the worker's traceback, not its line."""
    try:
        yield from loader
    except SamestepError as error:
        text = str(error)
        if not text.startswith("Caught "):
            raise
        raise type(error)(text.strip().splitlines()[-1].partition(": ")[2]) from error


def empty_like(batch: Any) -> Any:
    """Returns `batch` without its samples: every tensor's dim 0 is 0.

    >>> empty_like({"x": torch.ones(4, 3), "names": ["a", "b"]})
    {'x': tensor([], size=(0, 3)), 'names': []}
    """
    return _mapped(batch, lambda tensor: tensor[:0] if tensor.dim() else tensor, leaf=[])


def moved(batch: Any, device: torch.device) -> Any:
    """Returns `batch` with every tensor on `device`; copies from pinned memory do not wait."""
    return _mapped(batch, lambda tensor: tensor.to(device, non_blocking=True))


def tensors_of(batch: Any) -> list[torch.Tensor]:
    """Returns the tensors in a batch, in order."""
    found: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    _mapped(batch, keep)
    return found


def _mapped(batch: Any, change: Callable[[torch.Tensor], torch.Tensor], leaf: Any = None) -> Any:
    """Applies `change` to the tensors of a nested batch; a list or tuple without tensors becomes `leaf` if given."""
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        parts = {key: _mapped(value, change, leaf) for key, value in batch.items()}
        return parts if isinstance(batch, dict) else _like(batch, parts)
    if isinstance(batch, (list, tuple)):
        if leaf is not None and not any(isinstance(part, (torch.Tensor, Mapping, list, tuple)) for part in batch):
            return type(batch)(leaf)
        items = [_mapped(part, change, leaf) for part in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    return batch


def _like(batch: Mapping[Any, Any], parts: dict[Any, Any]) -> Any:
    """Keeps a mapping's own type (transformers' BatchEncoding, say) where it can be made of a dict."""
    try:
        return type(batch)(parts)  # type: ignore[call-arg]
    except TypeError:
        return parts


class Mover:
    """Takes host batches to the device; on CUDA on a stream of its own, one batch ahead of the computation."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def send(self, batch: Any) -> Any:
        """Starts the copy of one batch."""
        if self.stream is None:
            return moved(batch, self.device)
        with torch.cuda.stream(self.stream):
            return moved(batch, self.device)

    def receive(self, batch: Any) -> Any:
        """Makes the computation wait for the copy, and the allocator for the computation."""
        if self.stream is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_stream(self.stream)
            for tensor in tensors_of(batch):
                tensor.record_stream(current)
        return batch

    def stream_through(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yields the batches on the device; on CUDA the next copy is under way before one is handed out."""
        if self.stream is None:
            yield from map(self.send, batches)
            return
        ahead: Any = None
        for batch in batches:
            ready, ahead = ahead, self.send(batch)
            if ready is not None:
                yield self.receive(ready)
        if ahead is not None:
            yield self.receive(ahead)
