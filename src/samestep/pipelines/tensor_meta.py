"""What a rank knows of a tensor before it arrives: dtype, shape, and strides.

A kernel may add in another order where its inputs have other strides: scaled_dot_product_attention of a q that was
transposed, and of its contiguous copy, differ in their last bits. So a tensor arrives with the strides that it was sent
with:

    sent       q[b, h, t, d] in memory as b t h d        in the order of the memory, without a copy
    received   into memory b t h d, viewed as b h t d    likewise

A slice of something larger (a third of a qkv) gets its gaps again, up to MAX_GAP times its size; a tensor some of whose
elements share memory (expanded) becomes dense. PyTorch's stages send and receive contiguous copies.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from samestep.errors import ModelError

MAX_TENSORS = 8  # of a message
MAX_GAP = 4  # times as much memory as elements, for a tensor with gaps
HEADER_BYTES = 4096


@dataclass(frozen=True)
class TensorMeta:
    """Of one tensor.

    Example:
        >>> TensorMeta.of(torch.ones(2, 3).t()).strides
        (1, 3)
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # that it has where it arrives
    requires_grad: bool = False  # whether a gradient comes back

    @classmethod
    def of(cls, tensor: Tensor) -> TensorMeta:
        return _meta(tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.requires_grad)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"

    def matches(self, other: TensorMeta) -> bool:
        """Whether the one can be sent where the other is expected."""
        same = (self.dtype, self.shape, self.requires_grad) == (other.dtype, other.shape, other.requires_grad)
        return self is other or same

    def memory_view(self, tensor: Tensor) -> Tensor:
        """Returns a view of a tensor whose contiguous copy is sent: its dims in the order of the memory."""
        return tensor.detach().permute(self._order)

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self.packed_shape, dtype=self.dtype, device=device)

    def unpack(self, packed: Tensor) -> Tensor:
        """Returns what has arrived with its shape and strides."""
        if self._is_contiguous:
            return packed
        tensor = packed.permute([self._order.index(dim) for dim in range(len(self._order))])
        if _same_strides(tensor.stride(), self.strides, self.shape):
            return tensor
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=packed.device).copy_(tensor)

    @cached_property
    def packed_shape(self) -> tuple[int, ...]:
        return tuple(self.shape[dim] for dim in self._order)

    @cached_property
    def _order(self) -> list[int]:
        return _memory_order(self.strides)

    @cached_property
    def _is_contiguous(self) -> bool:
        dense = [math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape))]
        return self.packed_shape == self.shape and _same_strides(dense, self.strides, self.shape)


Metas = tuple[TensorMeta, ...]


@lru_cache
def _meta(
    dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], requires_grad: bool
) -> TensorMeta:  # called for each message, with few different arguments
    return TensorMeta(dtype, shape, _received_strides(shape, strides), requires_grad)


def _memory_order(strides: Sequence[int]) -> list[int]:
    """Returns the dims from the one with the largest stride to the one with the smallest."""
    return sorted(range(len(strides)), key=lambda dim: (-strides[dim], dim))


def _same_strides(one: Sequence[int], other: Sequence[int], shape: Sequence[int]) -> bool:
    return all(first == second for first, second, size in zip(one, other, shape, strict=True) if size > 1)


def _received_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Returns a tensor's own strides; dense ones in the same order where elements overlap, or gaps are large."""
    order = _memory_order(strides)
    extent, dense, step = 0, dict.fromkeys(order, 1), 1  # extent: of the inner dims, in elements
    overlaps = False
    for dim in reversed(order):
        dense[dim] = step
        step *= max(1, shape[dim])
        if shape[dim] > 1:
            overlaps |= strides[dim] <= extent
            extent += (shape[dim] - 1) * strides[dim]
    if overlaps or 0 in shape or extent + 1 > MAX_GAP * math.prod(shape):
        return tuple(dense[dim] for dim in range(len(shape)))
    return tuple(dense[dim] if shape[dim] == 1 else strides[dim] for dim in range(len(shape)))


def write_header(stage: int, metas: Metas) -> Tensor:
    """Returns the header that describes a message: JSON in HEADER_BYTES bytes.

    Example:
        >>> [str(meta) for meta in read_header(write_header(0, (TensorMeta.of(torch.ones(2, 3)),)))]
        ['float32 [2, 3]']
    """
    rows = [
        [str(one.dtype).removeprefix("torch."), list(one.shape), list(one.strides), one.requires_grad] for one in metas
    ]
    text = json.dumps(rows).encode()
    if len(metas) > MAX_TENSORS or len(text) > HEADER_BYTES:
        raise ModelError(
            f"stage {stage} gives {len(metas)} tensors, of up to {max(len(one.shape) for one in metas)} dims: "
            f"{MAX_TENSORS} can be sent, whose shapes take up to {HEADER_BYTES} bytes to tell"
        )
    return torch.frombuffer(bytearray(text.ljust(HEADER_BYTES)), dtype=torch.uint8)


def read_header(header: Tensor) -> Metas:
    rows = json.loads(header.cpu().numpy().tobytes())
    return tuple(
        TensorMeta(getattr(torch, dtype), tuple(shape), tuple(strides), requires_grad)
        for dtype, shape, strides, requires_grad in rows
    )


def describe(metas: Metas) -> str:
    return ", ".join(map(str, metas))
