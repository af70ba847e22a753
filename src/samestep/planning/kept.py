"""What autograd keeps from a forward to its backward, in bytes: what activations need of a device's memory.

    layer        saves                                counted
    Linear       its input, its weight                the input; the weight is a parameter
    ReLU         its output, which is also the        once
    next Linear  input of the next layer

What is one storage counts once. Of a storage that is larger than what is kept of it (a batch that was cut out of a
whole data set) only what is kept counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

import torch
from torch import Tensor

__all__: list[str] = []

_KINDS = (Tensor, torch.nn.Parameter)


class Kept:
    """Counts while it is entered; in the thread that enters it.

    Args:
        without: tensors that are there anyway: parameters and buffers.

    Example:
        >>> layer, x = torch.nn.Linear(4, 8), torch.ones(2, 4)
        >>> with Kept(layer.parameters()) as kept:
        ...     _ = layer(x)
        >>> kept.taken()
        32
    """

    def __init__(self, without: Iterable[Tensor]) -> None:
        self._without = {one.untyped_storage().data_ptr() for one in without if one.layout == torch.strided}
        self._found: dict[int, tuple[int, set[tuple[int, int]]]] = {}
        self._hooks: Any = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def __enter__(self) -> Self:
        self._hooks.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.__exit__()

    def taken(self) -> int:
        """Returns the bytes so far, and begins anew."""
        found, self._found = self._found, {}
        return sum(min(whole, sum(size for _, size in parts)) for whole, parts in found.values())

    def _pack(self, tensor: Tensor) -> Tensor:
        plain = type(tensor) in _KINDS and tensor.layout == torch.strided  # a compiler calls this with others
        if plain and not tensor.is_meta and not torch.compiler.is_compiling():
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._without:
                _, parts = self._found.setdefault(storage.data_ptr(), (storage.nbytes(), set()))
                parts.add((int(tensor.storage_offset()), tensor.nbytes))
        return tensor
