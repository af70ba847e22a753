"""What several ranks have used at once, as one batch: joined along dim 0, in rank order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from samestep.verification.recording.containers import named_parts, rebuilt
from samestep.verification.recording.rows import has_items, is_unstacked, rowed

_JOINED = (Tensor, np.ndarray, list, tuple, Mapping)  # of several parts each: what is anything else is one sample's


class UnjoinableError(Exception):
    """The batches of several ranks make no batch."""


def joined(parts: Sequence[Any], sizes: Sequence[int] = ()) -> Any:
    """Returns one batch for several; a single one stays as it is.

    Args:
        parts: the batches.
        sizes: samples of each; lists with one item a sample are then told from lists of stacked tensors.

    Raises:
        UnjoinableError: they differ in form, or nobody knows what joining would mean.
    """
    if _may_count(parts, sizes):
        raise UnjoinableError("a number in them is as large as their number of samples, and may be it")
    unstacked = any(is_unstacked(part, size) for part, size in zip(parts, sizes, strict=False))
    if not unstacked and len(parts) > 1 and any(map(_is_packed, parts, sizes)):
        raise UnjoinableError("a tensor in them has not one row for each sample, and others may tell places in it")
    return _joined(parts, sizes if unstacked else ())


def _is_packed(part: Any, size: int) -> bool:
    """Whether a batch has a tensor without a row for each sample: words of all texts, with the place of each text."""
    return size > 0 and any(leaf.shape[0] != size for leaf in rowed(part))


def _may_count(parts: Sequence[Any], sizes: Sequence[int]) -> bool:
    """Whether a batch tells its number of samples, which would be too small for the joined one."""
    named = [named_parts(part) or {} for part in parts]
    pairs = list(zip(named, sizes, strict=False))
    several = len(parts) > 1 and len(pairs) == len(parts) and all(size > 1 for size in sizes)
    return several and any(
        all(type(one.get(key)) is int and one[key] == size for one, size in pairs) for key in named[0]
    )


def _joined(parts: Sequence[Any], sizes: Sequence[int]) -> Any:
    first = parts[0]
    if len(parts) == 1:
        return first
    if any(type(part) is not type(first) for part in parts):
        raise UnjoinableError(f"a {type(first).__name__} and another type")
    if isinstance(first, Tensor):
        return _joined_tensors(parts)
    if isinstance(first, np.ndarray):
        if first.ndim == 0 or any(part.shape[1:] != first.shape[1:] or part.dtype != first.dtype for part in parts):
            raise UnjoinableError("arrays whose shapes differ beyond the first dim")
        return np.concatenate(parts)
    if (named := named_parts(first)) is not None:
        named_each = [named_parts(part) or {} for part in parts]
        if any(one.keys() != named.keys() for one in named_each):
            raise UnjoinableError("dictionaries with different keys")
        return rebuilt(first, {name: _joined([one[name] for one in named_each], sizes) for name in named})
    if isinstance(first, list | tuple):
        return _joined_lists(parts, sizes)
    if _are_equal(parts):
        return first
    raise UnjoinableError(f"a {type(first).__name__} that differs from rank to rank")


def _are_equal(parts: Sequence[Any]) -> bool:
    try:
        return all(bool(part == parts[0]) for part in parts)
    except (RuntimeError, ValueError):  # of tensors inside, which are compared one by one
        return False


def _joined_tensors(parts: Sequence[Tensor]) -> Tensor:
    if parts[0].dim() == 0:
        return torch.stack(list(parts))
    if any(part.shape[1:] != parts[0].shape[1:] or part.dtype != parts[0].dtype for part in parts):
        raise UnjoinableError("tensors whose shapes differ beyond dim 0")
    return torch.cat(list(parts))


def _joined_lists(parts: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Lists of texts, numbers or pictures, one a sample, are put behind one another; others are joined one by one."""
    first = parts[0]
    one_each = sizes and all(has_items(part, size) for part, size in zip(parts, sizes, strict=True))
    if one_each or (first and not isinstance(first[0], _JOINED)):
        return type(first)(item for part in parts for item in part)
    if any(len(part) != len(first) for part in parts):
        raise UnjoinableError("lists of different lengths")
    return type(first)(_joined(group, sizes) for group in zip(*parts, strict=True))


def permuted(value: Any, order: Tensor) -> Any:
    """Returns a batch with its samples in another order; what has no sample in dim 0 stays."""
    return _permuted(value, order, unstacked=is_unstacked(value, len(order)))


def _permuted(value: Any, order: Tensor, *, unstacked: bool) -> Any:
    if isinstance(value, Tensor):
        return value[order] if value.dim() and value.shape[0] == len(order) else value
    if isinstance(value, np.ndarray):
        return value[order.numpy()] if value.ndim and value.shape[0] == len(order) else value
    if (parts := named_parts(value)) is not None:
        return rebuilt(value, {name: _permuted(one, order, unstacked=unstacked) for name, one in parts.items()})
    if isinstance(value, list | tuple):
        is_of_others = len(value) == len(order) and value and not isinstance(value[0], _JOINED)
        if is_of_others or (unstacked and has_items(value, len(order))):
            return type(value)(value[int(index)] for index in order)
        return type(value)(_permuted(one, order, unstacked=unstacked) for one in value)
    return value
