"""Batches of nested tensors: emptied, sliced, moved to the device. A rank without samples gets an empty batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch


def empty_like(batch: Any, *, own: bool = False) -> Any:
    """Returns `batch` without its samples: every tensor's dim 0 is 0; with `own` none shares the batch's memory.

    >>> empty_like({"x": torch.ones(4, 3), "names": ["a", "b"]})
    {'x': tensor([], size=(0, 3)), 'names': []}
    """

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        empty = tensor[:0] if tensor.dim() else tensor
        return empty.clone() if own else empty

    return _map_tensors(batch, cut, leaf=[])


def to_device(batch: Any, device: torch.device) -> Any:
    return _map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))


def slice_batch(batch: Any, begin: int, end: int) -> Any:
    """Returns the samples [begin, end) of `batch`: those of dim 0 of every tensor, which share its memory.

    >>> slice_batch({"x": torch.arange(4), "y": [torch.arange(4)]}, 1, 3)
    {'x': tensor([1, 2]), 'y': [tensor([1, 2])]}
    """
    return _map_tensors(batch, lambda tensor: tensor[begin:end])


def first_samples(batch: Any, count: int, samples: int) -> Any:
    """Returns `batch` with `count` of its samples, which are dim 0 of those tensors where it has that length.

    >>> first_samples((torch.arange(4), torch.eye(2)), 1, 4)
    (tensor([0]), tensor([[1., 0.],
            [0., 1.]]))
    """

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[:count] if tensor.dim() and len(tensor) == samples else tensor

    return _map_tensors(batch, cut)


def tensors_of(batch: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    _map_tensors(batch, keep)
    return found


def _map_tensors(batch: Any, change: Callable[[torch.Tensor], torch.Tensor], leaf: Any = None) -> Any:
    """Applies `change` to the tensors of a nested batch; a list or plain tuple without any becomes `leaf` if given."""
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        parts = {key: _map_tensors(value, change, leaf) for key, value in batch.items()}
        if type(batch) is dict:
            return parts
        try:  # a mapping's own type (transformers' BatchEncoding, say) where it can be made of a dict
            return type(batch)(parts)  # type: ignore[call-arg]
        except TypeError:
            return parts
    if isinstance(batch, (list, tuple)):
        named = hasattr(batch, "_fields")
        nested = any(isinstance(part, (torch.Tensor, Mapping, list, tuple)) for part in batch)
        if leaf is not None and not nested and not named:
            return type(batch)(leaf)
        items = [_map_tensors(part, change, leaf) for part in batch]
        return type(batch)(*items) if named else type(batch)(items)
    return batch


class DevicePrefetcher:
    """Moves host batches to the device; on CUDA on a stream of its own, one batch ahead of the computation."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def send(self, batch: Any) -> Any:
        if self.stream is None:
            return to_device(batch, self.device)
        with torch.cuda.stream(self.stream):
            return to_device(batch, self.device)

    def receive(self, batch: Any) -> Any:
        """Makes the computation wait for the copy, and the allocator for the computation."""
        if self.stream is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_stream(self.stream)
            for tensor in tensors_of(batch):
                tensor.record_stream(current)
        return batch

    def stream_through(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yields the batches on the device; on CUDA the next copy is under way before one is yielded."""
        if self.stream is None:
            yield from map(self.send, batches)
            return
        following: Any = None
        for batch in batches:
            ready, following = following, self.send(batch)
            if ready is not None:
                yield self.receive(ready)
        if following is not None:
            yield self.receive(following)
