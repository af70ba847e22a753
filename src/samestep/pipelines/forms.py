"""What is known of a tensor before it comes: type, shape, and how it lies in memory.

A kernel may add in another order where its inputs lie otherwise: scaled_dot_product_attention of a q that was turned
with transpose(1, 2), and of a copy that lies straight, differ in their last bits. So what is sent arrives as it lay:

    sent       q[b, h, t, d] over memory b t h d        as the numbers lie, without a copy
    arrives    into memory b t h d, seen as b h t d     likewise

A part of something larger (a third of a qkv) gets its gaps again, up to MOST_SPREAD times its size; a tensor of which
some elements are one and the same (expanded) lies close. PyTorch's stages send and receive contiguous copies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from samestep.errors import ModelError

__all__: list[str] = []

MOST_TENSORS, MOST_DIMS = 8, 8  # of a message
MOST_SPREAD = 4  # times as much memory as elements, for a tensor with gaps
_TYPES = (
    torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
_WORDS = 3 + 2 * MOST_DIMS  # of a form in a header
LENGTH = 1 + MOST_TENSORS * _WORDS  # of a header


@dataclass(frozen=True)
class Form:
    """Of one tensor.

    Attributes:
        dtype: its type.
        shape: its sizes.
        strides: elements from one to the next, by dim, as they shall be where it arrives.
        wants_gradient: whether a gradient is to come back.

    Example:
        >>> Form.of(torch.ones(2, 3).t()).strides
        (1, 3)
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    wants_gradient: bool = False

    @classmethod
    def of(cls, tensor: Tensor) -> Form:
        """Returns that of a tensor."""
        return _form(tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.requires_grad)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"

    def is_like(self, other: Form) -> bool:
        """Whether the one can be sent where the other is waited for."""
        same = (self.dtype, self.shape, self.wants_gradient) == (other.dtype, other.shape, other.wants_gradient)
        return self is other or same

    def packed(self, tensor: Tensor) -> Tensor:
        """Returns what is sent of a tensor: its elements in the order in which they shall lie."""
        return self.ordered(tensor).contiguous()

    def ordered(self, tensor: Tensor) -> Tensor:
        """Returns a view of a tensor, its dims in the order in which a copy shall lie."""
        return tensor.detach().permute(self._order)

    def blank(self, device: torch.device) -> Tensor:
        """Returns memory for what is sent."""
        return torch.empty(self.sizes, dtype=self.dtype, device=device)

    def unpacked(self, sent: Tensor) -> Tensor:
        """Returns what has come as it lay."""
        if self._is_straight:
            return sent
        tensor = sent.permute([self._order.index(dim) for dim in range(len(self._order))])
        if all(
            has == wants for has, wants, size in zip(tensor.stride(), self.strides, self.shape, strict=True) if size > 1
        ):
            return tensor
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=sent.device).copy_(tensor)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Of what is sent, whose elements lie close."""
        return tuple(self.shape[dim] for dim in self._order)

    @cached_property
    def _order(self) -> list[int]:
        return _order(self.strides)

    @cached_property
    def _is_straight(self) -> bool:
        """Whether what is sent is the tensor as it lies."""
        close = [math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape))]
        sizes = zip(self.strides, close, self.shape, strict=True)
        return self.sizes == self.shape and all(has == wants for has, wants, size in sizes if size > 1)


Forms = tuple[Form, ...]


@lru_cache
def _form(dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], wants_gradient: bool) -> Form:
    """Returns that of tensors; asked for with each message, and of few kinds."""
    return Form(dtype, shape, _strides(shape, strides), wants_gradient)


def _order(strides: Sequence[int]) -> list[int]:
    """Returns the dims from that with the largest steps in memory to that with the smallest."""
    return sorted(range(len(strides)), key=lambda dim: (-strides[dim], dim))


def _strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Returns a tensor's own, or where these would not do the same order of dims lying close."""
    order = _order(strides)
    reach, close, each = 0, dict.fromkeys(order, 1), 1  # reach: of the dims inside, in elements
    overlaps = False
    for dim in reversed(order):
        close[dim] = each
        each *= max(1, shape[dim])
        if shape[dim] > 1:
            overlaps |= strides[dim] <= reach
            reach += (shape[dim] - 1) * strides[dim]
    if overlaps or 0 in shape or reach + 1 > MOST_SPREAD * math.prod(shape):
        return tuple(close[dim] for dim in range(len(shape)))
    return tuple(close[dim] if shape[dim] == 1 else strides[dim] for dim in range(len(shape)))


def header(stage: int, forms: Forms) -> Tensor:
    """Returns what tells forms, in int64 of one length: how many, then type, flag, dims, sizes and strides of each.

    Raises:
        ModelError: they are too many, or of a type that cannot be told.
    """
    if len(forms) > MOST_TENSORS or any(len(form.shape) > MOST_DIMS for form in forms):
        raise ModelError(
            f"stage {stage} gives {len(forms)} tensors, of up to {max(len(form.shape) for form in forms)} dims: "
            f"{MOST_TENSORS} of {MOST_DIMS} can be sent"
        )
    words = [len(forms)]
    for form in forms:
        if form.dtype not in _TYPES:
            raise ModelError(f"stage {stage} gives a tensor of {form.dtype}, which cannot be sent")
        padding = [0] * (MOST_DIMS - len(form.shape))
        words += [_TYPES.index(form.dtype), int(form.wants_gradient), len(form.shape)]
        words += [*form.shape, *padding, *form.strides, *padding]
    return torch.tensor(words + [0] * (LENGTH - len(words)))


def read(words: list[int]) -> Forms:
    """Returns the forms that a header tells.

    >>> [str(form) for form in read(header(0, (Form.of(torch.ones(2, 3)),)).tolist())]
    ['float32 [2, 3]']
    """
    parts = [words[1 + _WORDS * number : 1 + _WORDS * (number + 1)] for number in range(words[0])]
    return tuple(
        Form(_TYPES[kind], tuple(sizes[:dims]), tuple(sizes[MOST_DIMS : MOST_DIMS + dims]), bool(wants))
        for kind, wants, dims, *sizes in parts
    )


def told(forms: Forms) -> str:
    """Returns forms in words."""
    return ", ".join(map(str, forms))
