"""Parameters that are cut over the ranks (DTensor: fully_shard): which part a rank holds, and the whole of all parts.

A digest carries the place of its part, and only digests of one place are comparable. Nothing here is collective: each
rank looks at what it holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from samestep.checkpoints.sharding import is_sharded, local_boxes
from samestep.runtime.digest import digest


@dataclass(frozen=True)
class Part:
    """What one rank holds of a tensor; `offsets` is None where that is nothing.

    With `strides` it is a stretch of the tensor's memory, which has these strides, from its one offset on.
    """

    shape: tuple[int, ...]
    offsets: tuple[int, ...] | None
    values: Tensor
    strides: tuple[int, ...] | None = None

    @property
    def place(self) -> str:
        return "nowhere" if self.offsets is None else f"{list(self.offsets)}+{list(self.values.shape)}"


@dataclass(frozen=True)
class Due:
    """What one rank has of a sum that is still to be taken over the ranks, as of a gradient of sequence parallelism."""

    values: Tensor


def is_cut(tensor: Any) -> bool:
    """Returns whether the ranks hold different parts of a tensor."""
    return is_sharded(tensor) and not all(placement.is_replicate() for placement in tensor.placements)


def local(tensor: Any) -> Any:
    """Returns what this rank holds, as a plain tensor; what is no tensor stays what it is."""
    return tensor.to_local().detach() if is_sharded(tensor) else tensor


def held(tensors: Sequence[Any]) -> list[Any]:
    """Returns the tensors, a :class:`Part` in place of those that are cut, and a :class:`Due` of sums that are due.

    What is a part already stays one.
    """
    cut = {str(i): one for i, one in enumerate(tensors) if is_cut(one) and not _is_due(one)}
    found = local_boxes(cut)
    parts: list[Any] = []
    for i, tensor in enumerate(tensors):
        if str(i) in found:
            cell, values = found[str(i)]
            parts.append(Part(tuple(tensor.shape), cell.offset, values.detach()))
        elif str(i) in cut:
            parts.append(Part(tuple(tensor.shape), None, local(tensor)))
        else:
            parts.append(_due(tensor) if is_sharded(tensor) and _is_due(tensor) else local(tensor))
    return parts


def _due(tensor: Any) -> Due | None:
    """None where more than one sum is due, or parts of one: which ranks add up what is not looked into."""
    kinds = [placement for placement in tensor.placements if not placement.is_replicate()]
    is_sum = len(kinds) == 1 and getattr(kinds[0], "reduce_op", None) == "sum" and len(tensor.placements) == 1
    return Due(local(tensor)) if is_sum else None


def _is_due(tensor: Any) -> bool:
    return any(placement.is_partial() for placement in tensor.placements)


def digest_of(part: Any) -> str | None:
    """Returns the digest of one of `held`, with its place; none of a sum that is due."""
    if isinstance(part, Due):
        return None
    return f"{part.place} {digest(part.values)}" if isinstance(part, Part) else digest(part)


def joined(values: Sequence[Any]) -> Any:
    """Returns what all ranks hold, by name: of replicas the first, of parts the whole tensor."""
    first = values[0]
    if isinstance(first, dict):
        keys = dict.fromkeys(key for value in values for key in value)
        return {key: joined([value[key] for value in values if key in value]) for key in keys}
    if isinstance(first, Due):
        total: Tensor = torch.stack([one.values for one in values]).sum(0)
        return total
    parts = [value for value in values if isinstance(value, Part)]
    if not parts or (len(parts) < len(values) and all(part.offsets is None for part in parts)):
        return next((value for value in values if not isinstance(value, Part)), None)
    first = next((part for part in parts if part.offsets is not None), parts[0])
    whole = torch.zeros(first.shape, dtype=first.values.dtype)
    if first.strides is not None:
        whole = torch.empty_strided(first.shape, first.strides, dtype=first.values.dtype).zero_()
    for part in parts:
        if part.offsets is not None:
            region(whole, part.offsets, tuple(part.values.shape)).copy_(part.values)
    return whole


def region(tensor: Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Returns a view of a box of a tensor; one offset in a tensor of other dims begins a stretch of its memory."""
    if len(offsets) != tensor.dim():
        tensor = tensor.as_strided((tensor.numel(),), (1,))
    return tensor[tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))]


def has_parts(value: Any) -> bool:
    """Returns whether any of nested values is a part, or a sum that is due."""
    if isinstance(value, dict):
        return any(has_parts(one) for one in value.values())
    return any(map(has_parts, value)) if isinstance(value, list) else isinstance(value, Part | Due)
