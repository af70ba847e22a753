"""Half as many bytes: float16 with a scale for each row, and bfloat16.

float16 ends at 65504 and begins at 6e-8, and gradients lie on both sides. Here each row is multiplied by a power of
two that brings its largest element between 2^14 and 2^15, which loses nothing by itself; PyTorch's fp16 hook casts as
it is, and adds in float16, where a sum overflows that a mean would not. bfloat16 has float32's range; PyTorch's hook
for it wants a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from samestep.compress.codec import HALVES, RowCodec, largest, scales_of, with_scales
from samestep.errors import UsageError

__all__ = ["BFloat16", "Float16"]

_LEAST = -100  # exponent below which a row counts as that large, so that its factor is finite
_TOP = 15  # float16 takes exponents up to this


@dataclass(frozen=True, kw_only=True)
class _Half(RowCodec):
    feedback: bool = False  # rounding loses less than the noise of a batch

    def check_dtype(self, name: str, dtype: torch.dtype) -> None:
        """Refuses what it cannot code."""
        super().check_dtype(name, dtype)
        if dtype in HALVES:
            raise UsageError(f"{self.name} saves nothing where gradients have 2 bytes already, as {name} has: try Int8")


@dataclass(frozen=True, kw_only=True)
class Float16(_Half):
    """float16 with a scale for each row: half the bytes.

    The error is at most 2^-11 of each number, or 2^-39 of the row's largest.

    Example:
        >>> codec = Float16(block=8)
        >>> codec.decode(codec.encode(torch.full((1, 8), 3 * 2.0**100)))[0, 0].item() == 3 * 2.0**100
        True
    """

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's packet."""
        return 4 + 2 * self.block

    def encode(self, rows: Tensor, noise: Tensor | None = None) -> Tensor:  # noqa: ARG002
        """Returns packets."""
        exponents = torch.frexp(largest(rows)).exponent.clamp_(min=_LEAST)
        one = torch.ones_like(exponents, dtype=torch.float32)
        packets, values = with_scales(torch.ldexp(one, exponents - _TOP), 2 * self.block)
        values.view(torch.float16).copy_(rows * torch.ldexp(one, _TOP - exponents))
        return packets

    def decode(self, packets: Tensor) -> Tensor:
        """Returns rows."""
        return packets[:, 4:].view(torch.float16).float().mul_(scales_of(packets))


@dataclass(frozen=True, kw_only=True)
class BFloat16(_Half):
    """bfloat16: half the bytes, an error of at most 2^-9 of each number."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's packet."""
        return 2 * self.block

    def encode(self, rows: Tensor, noise: Tensor | None = None) -> Tensor:  # noqa: ARG002
        """Returns packets."""
        return rows.to(torch.bfloat16).view(torch.uint8)

    def decode(self, packets: Tensor) -> Tensor:
        """Returns rows."""
        return packets.view(torch.bfloat16).float()
