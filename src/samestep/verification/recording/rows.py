"""What tells the samples in a batch apart: a digest of each one's values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import xxhash
from torch import Tensor

from samestep.runtime.digest import bytes_of

__all__: list[str] = []


def leaves(value: Any) -> list[Any]:
    """Returns everything in a batch that is no container, in order."""
    if isinstance(value, Mapping):
        return [leaf for one in value.values() for leaf in leaves(one)]
    if isinstance(value, list | tuple):
        return [leaf for one in value for leaf in leaves(one)]
    return [value]


def count(value: Any) -> int:
    """Returns how many samples a batch has: the most frequent first dim of its tensors, 0 where it has none."""
    sizes = [leaf.shape[0] for leaf in rowed(value)]
    return max(sizes, key=sizes.count) if sizes else 0


def rowed(value: Any) -> list[Tensor]:
    """Returns the tensors of a batch whose rows lie one behind the other: a sparse one, or a nested one, has none."""
    tensors = [leaf for leaf in leaves(value) if isinstance(leaf, Tensor)]
    return [one for one in tensors if one.layout == torch.strided and not one.is_nested and one.dim()]


def row_digests(value: Any) -> list[str]:
    """Returns 16 hexadecimal digits for every sample of a batch; empty where it cannot be taken apart."""
    size = count(value)
    tensors = [leaf for leaf in rowed(value) if leaf.shape[0] == size]
    if not size or not tensors:
        return []
    rows = [bytes_of(tensor.cpu()).view(size, -1).numpy() for tensor in tensors]
    told = []
    for index in range(size):
        digest = xxhash.xxh3_64()
        for row in rows:
            digest.update(row[index].data)
        told.append(digest.hexdigest())
    return told


def held(value: Any) -> Any:
    """Returns a batch that nobody changes any more, on the host."""
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(held, value))
    if isinstance(value, list | tuple):
        return type(value)(map(held, value))
    if isinstance(value, dict):
        return {key: held(one) for key, one in value.items()}
    if isinstance(value, Mapping) and hasattr(value, "data"):  # BatchEncoding and its like
        return {key: held(one) for key, one in value.items()}
    return value
