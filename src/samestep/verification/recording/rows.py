"""What tells the samples in a batch apart: a digest of each one's values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import xxhash
from torch import Tensor

from samestep.runtime.digest import bytes_of
from samestep.verification.recording.containers import named_parts

_WHOLE = (torch.int32, torch.int64)  # types of places in a tensor


def leaves(value: Any) -> list[Any]:
    """Returns everything in a batch that is no container, in order."""
    inner = _inner(value)
    return [value] if inner is None else [leaf for one in inner for leaf in leaves(one)]


def _inner(value: Any) -> list[Any] | None:
    """What lies in a container, in order; None of what is none."""
    if (parts := named_parts(value)) is not None:
        return list(parts.values())
    return list(value) if isinstance(value, list | tuple) else None


def has_items(value: Any, samples: int) -> bool:
    """Whether a list may have one item a sample, and is no list of such lists, as pictures and their labels are."""
    if not isinstance(value, list | tuple) or hasattr(value, "_fields") or not 0 < len(value) == samples:
        return False
    return not any(isinstance(item, list | tuple) and len(item) == samples for item in value)


def is_unstacked(value: Any, samples: int) -> bool:
    """Whether a batch has a list with one item a sample: pictures of any size, dictionaries of boxes.

    >>> pictures, boxes = [torch.ones(3, 8, 8)] * 2, [{"boxes": torch.ones(5, 4)}] * 2
    >>> is_unstacked((pictures, boxes), 2), is_unstacked((torch.ones(2, 3, 8, 8), torch.ones(2)), 2)
    (True, False)
    """
    if has_items(value, samples):
        kinds = {(type(item), getattr(item, "dtype", None), getattr(item, "ndim", None)) for item in value}
        return len(kinds) == 1 and any(tensor.shape[0] != samples for tensor in rowed(value))  # not x, and y
    return any(is_unstacked(one, samples) for one in _inner(value) or ())


def count(value: Any, samples: int = 0) -> int:
    """Returns how many samples a batch has: the most frequent first dim of its tensors, 0 where it has none.

    Of a batch that is not stacked it is the number of samples that was requested, 0 if unknown.
    """
    if is_unstacked(value, samples):
        return samples
    sizes = [leaf.shape[0] for leaf in rowed(value)]
    return max(sizes, key=sizes.count) if sizes else 0


def rowed(value: Any) -> list[Tensor]:
    """Returns the tensors of a batch whose rows lie one behind the other: a sparse one, or a nested one, has none."""
    tensors = [leaf for leaf in leaves(value) if isinstance(leaf, Tensor)]
    return [one for one in tensors if one.layout == torch.strided and not one.is_nested and one.dim()]


def row_digests(value: Any, samples: int = 0, *, loaded: bool = False) -> list[str]:
    """Returns 16 hexadecimal digits for every sample of a batch; empty where it cannot be taken apart.

    Args:
        value: the batch, or what a model gets.
        samples: the number of samples that the batch was requested with; 0 if unknown.
        loaded: it is of a DataLoader. A tensor of other rows then has parts of all samples, the words of all texts,
            say; of what a model gets it is a mask, say, and is left out.
    """
    if is_unstacked(value, samples):
        return [_digest(_of(value, samples, index)) for index in range(samples)]
    if not loaded and (samples_of := _packed(value)):
        return [_digest(one) for one in samples_of]
    size = count(value)
    tensors = [leaf for leaf in rowed(value) if leaf.shape[0] == size]
    if not size or not tensors or (loaded and len(tensors) < len(rowed(value))):
        return []
    rows = [bytes_of(tensor.cpu()).view(size, -1).numpy() for tensor in tensors]
    digests = []
    for index in range(size):
        digest = xxhash.xxh3_64()
        for row in rows:
            digest.update(row[index].data)
        digests.append(digest.hexdigest())
    return digests


def _packed(value: Any) -> list[list[Tensor]]:
    """What a batch has of each sample, if these lie one behind the other and it has their starts, as EmbeddingBag gets.

    >>> words, starts = torch.tensor([5, 6, 7, 8]), torch.tensor([0, 1])
    >>> _packed((words, starts))
    [[tensor([5])], [tensor([6, 7, 8])]]
    """
    tensors = rowed(value)
    for starts in tensors:
        others = [one for one in tensors if one is not starts]
        long = [one for one in others if len(one) > len(starts)]
        if starts.dtype in _WHOLE and starts.dim() == 1 and any(one.dtype in _WHOLE and one.dim() == 1 for one in long):
            begins = starts.tolist()
            is_one_length = len({len(one) for one in long}) == 1 and all(len(one) >= len(starts) for one in others)
            if is_one_length and begins[0] == 0 and begins == sorted(begins) and begins[-1] <= len(long[0]):
                ends = [*begins[1:], len(long[0])]
                rest = [one for one in others if len(one) == len(starts)]
                return [
                    [one[begin:end] for one in long] + [one[i] for one in rest]
                    for i, (begin, end) in enumerate(zip(begins, ends, strict=True))
                ]
    return []


def _of(value: Any, samples: int, index: int) -> Iterator[Tensor]:
    """Yields what a batch that nobody has stacked has of one sample."""
    if has_items(value, samples):
        yield from rowed(value[index])
    elif isinstance(value, Tensor):
        yield from (one[index] for one in rowed(value) if one.shape[0] == samples)
    else:
        for one in _inner(value) or ():
            yield from _of(one, samples, index)


def _digest(tensors: Iterable[Tensor]) -> str:
    digest = xxhash.xxh3_64()
    for tensor in tensors:
        digest.update(bytes_of(tensor.cpu()).numpy().data)
    return digest.hexdigest()
