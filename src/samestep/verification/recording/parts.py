"""Parameters that are cut over the ranks (DTensor: fully_shard): which part a rank holds, and the whole of all parts.

    rank 0   Part [0:2, 0:3] of [4, 3]   ┐
    rank 1   Part [2:4, 0:3] of [4, 3]   ┴──►  the tensor, as one process has it

Of each part there is one copy, or with replicated groups (HSDP) one in each group: a digest carries the place of its
part, and only digests of one place are comparable. Nothing here is collective: each rank looks at what it holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from samestep.running.checkpoints.sharded import is_sharded, local_boxes, part_of
from samestep.runtime.digest import digest

__all__: list[str] = []


@dataclass(frozen=True)
class Part:
    """What one rank holds of a tensor; `offsets` is None where that is nothing."""

    shape: tuple[int, ...]
    offsets: tuple[int, ...] | None
    values: Tensor

    @property
    def place(self) -> str:
        """Where it lies, for a digest."""
        return "nowhere" if self.offsets is None else f"{list(self.offsets)}+{list(self.values.shape)}"


def is_cut(tensor: Any) -> bool:
    """Returns whether the ranks hold different parts of a tensor."""
    return is_sharded(tensor) and not all(placement.is_replicate() for placement in tensor.placements)


def local(tensor: Any) -> Any:
    """Returns what this rank holds, as a plain tensor; what is no tensor stays what it is."""
    return part_of(tensor).detach() if is_sharded(tensor) else tensor


def held(tensors: Sequence[Any]) -> list[Any]:
    """Returns the tensors, and a :class:`Part` in place of those that are cut. Sums that are still due are None."""
    cut = {str(i): one for i, one in enumerate(tensors) if is_cut(one) and not _is_due(one)}
    found = local_boxes(cut)
    told: list[Any] = []
    for i, tensor in enumerate(tensors):
        if str(i) in found:
            cell, values = found[str(i)]
            told.append(Part(tuple(tensor.shape), cell.offset, values.detach()))
        elif str(i) in cut:
            told.append(Part(tuple(tensor.shape), None, local(tensor)))
        else:
            told.append(None if is_sharded(tensor) and _is_due(tensor) else local(tensor))
    return told


def _is_due(tensor: Any) -> bool:
    return any(placement.is_partial() for placement in tensor.placements)


def digest_of(part: Any) -> str:
    """Returns the digest of one of `held`, with its place."""
    return f"{part.place} {digest(part.values)}" if isinstance(part, Part) else digest(part)


def joined(values: Sequence[Any]) -> Any:
    """Returns the first of some values, one of each rank and built alike, with its parts put together."""
    first = values[0]
    if isinstance(first, dict):
        return {key: joined([value[key] for value in values if key in value]) for key in first}
    if isinstance(first, list):
        return [joined(row) for row in zip(*values, strict=True)]
    if not isinstance(first, Part):
        return first
    whole = torch.zeros(first.shape, dtype=first.values.dtype)
    for part in values:
        if part.offsets is not None:
            at = tuple(slice(start, start + size) for start, size in zip(part.offsets, part.values.shape, strict=True))
            whole[at] = part.values.cpu()
    return whole


def has_parts(value: Any) -> bool:
    """Returns whether any of nested values is a part."""
    if isinstance(value, dict):
        return any(has_parts(one) for one in value.values())
    return any(map(has_parts, value)) if isinstance(value, list) else isinstance(value, Part)
