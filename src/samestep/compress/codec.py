"""What a codec is: how rows of numbers become fewer bytes, and numbers again.

A codec is a value that declares itself (a frozen dataclass) and pure mathematics on tensors; it knows nothing of ranks.
Gradients come as rows of `block` elements, each of which is coded by itself into a packet of the same length, so that
any rank can take any row:

    rows      [R, block]   float32         encode           packets   [R, row_bytes]   uint8
    g0 g1 ... g511                 ─────────────────────▶   scale | q0 q1 ... q511          (int8: 4 + 512 bytes)
              [R, block]   float32         decode

:class:`Plain` loses nothing; it stands first, and is what tensors travel by that are exempt.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from samestep.errors import UsageError

__all__ = ["Codec", "Plain", "RowCodec"]

HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class Codec:
    """What all codecs declare.

    Args:
        feedback: what is lost in one step is added to the next step's gradient (error feedback). Source: F. Seide et
            al., "1-Bit Stochastic Gradient Descent", Interspeech 2014; S. P. Karimireddy et al., "Error Feedback Fixes
            SignSGD", ICML 2019.
        exempt: tensors of fewer elements travel as they are, as do those with one dim (biases, norms), which are few
            bytes and do harm.
    """

    feedback: bool = True
    exempt: int = 1024

    def __post_init__(self) -> None:
        if isinstance(self.exempt, bool) or not isinstance(self.exempt, int) or self.exempt < 0:
            raise UsageError(f"exempt={self.exempt!r} is no number of elements: give a whole number, 0 or more")

    @property
    def name(self) -> str:
        """How the codec is called."""
        return type(self).__name__

    @property
    def rounds(self) -> int:
        """How many messages, one after another, a sum takes."""
        return 2

    @property
    def cuts(self) -> bool:
        """Whether a tensor may be cut into pieces."""
        return True

    def declared(self) -> dict[str, Any]:
        """Returns all that shapes the result, as JSON."""
        return {"codec": self.name, **dataclasses.asdict(self)}

    def takes(self, shape: torch.Size) -> bool:
        """Whether a tensor of this shape is compressed."""
        return len(shape) > 1 and shape.numel() >= max(self.exempt, 1)

    def check_dtype(self, name: str, dtype: torch.dtype) -> None:
        """Refuses what it cannot code.

        Args:
            name: the parameter's.
            dtype: its gradient's.

        Raises:
            UsageError: it is complex, say.
        """
        if dtype not in (torch.float32, *HALVES):
            raise UsageError(
                f"{self.name} codes float32, float16 and bfloat16, and {name} is {_short(dtype)}: train in one of "
                "these, or leave compress out"
            )


@dataclass(frozen=True, kw_only=True)
class RowCodec(Codec, ABC):
    """A codec of rows.

    Args:
        block: elements of a row, a multiple of 8; all of them share a scale, if there is one.
    """

    block: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.block, bool) or not isinstance(self.block, int) or self.block < 8 or self.block % 8:
            raise UsageError(f"block={self.block!r} is no length of rows: give a multiple of 8, such as 512")

    @property
    def needs_noise(self) -> bool:
        """Whether `encode` is to be given noise."""
        return False

    @property
    @abstractmethod
    def row_bytes(self) -> int:
        """Bytes of a row's packet, a multiple of 4."""

    @abstractmethod
    def encode(self, rows: Tensor, noise: Tensor | None = None) -> Tensor:
        """Returns packets, [R, row_bytes] of uint8.

        A row that holds NaN or Inf comes back with NaN or Inf in it, so that it is not overlooked.

        Args:
            rows: [R, block] of float32; not changed.
            noise: likewise, uniform in [0, 1), where it is needed.
        """

    @abstractmethod
    def decode(self, packets: Tensor) -> Tensor:
        """Returns rows, [R, block] of float32."""


@dataclass(frozen=True, kw_only=True)
class Plain(RowCodec):
    """Loses nothing of float32."""

    block: int = 64
    feedback: bool = False
    exempt: int = 0

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's packet."""
        return 4 * self.block

    def encode(self, rows: Tensor, noise: Tensor | None = None) -> Tensor:  # noqa: ARG002
        """Returns packets."""
        return rows.contiguous().view(torch.uint8)

    def decode(self, packets: Tensor) -> Tensor:
        """Returns rows."""
        return packets.view(torch.float32)


def with_scales(scales: Tensor, values: int) -> tuple[Tensor, Tensor]:
    """Returns packets of a float32 scale and so many bytes of values, and the part for the values.

    Args:
        scales: [R, 1].
        values: bytes of them in a row.
    """
    packets = torch.empty(len(scales), 4 + values, dtype=torch.uint8, device=scales.device)
    packets[:, :4].view(torch.float32).copy_(scales)
    return packets, packets[:, 4:]


def scales_of(packets: Tensor) -> Tensor:
    """Returns the scales, [R, 1] of float32, that packets begin with."""
    return packets[:, :4].view(torch.float32)


def largest(rows: Tensor) -> Tensor:
    """Returns the largest absolute value of each row, [R, 1]; NaN where there is one."""
    return torch.maximum(rows.amax(1, keepdim=True), rows.amin(1, keepdim=True).neg_())  # 2.4 ms for 4 M; abs() 3.6


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
