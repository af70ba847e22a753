"""A thirtieth of the bytes: the sign of each element, and the mean absolute value of the row.

Without error feedback it does not converge; with it, it does. PyTorch has no codec like it.

Sources: J. Bernstein et al., "signSGD: Compressed Optimisation for Non-Convex Problems", ICML 2018; S. P. Karimireddy
et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML 2019 (the scale).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from samestep.compress.codec import RowCodec, scales_of, with_scales
from samestep.errors import UsageError

__all__ = ["Sign"]


@dataclass(frozen=True, kw_only=True)
class Sign(RowCodec):
    """The sign of each element, times the mean absolute value of its row: 1 bit an element.

    Example:
        >>> codec = Sign(block=32)
        >>> codec.decode(codec.encode(torch.tensor([[4.0, -2.0] * 16])))[0, :3].tolist()
        [3.0, -3.0, 3.0]
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block % 32:
            raise UsageError(f"block={self.block} does not fit Sign, which packs signs: give a multiple of 32")

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's packet."""
        return 4 + self.block // 8

    def encode(self, rows: Tensor, noise: Tensor | None = None) -> Tensor:  # noqa: ARG002
        """Returns packets."""
        packets, values = with_scales(rows.abs().mean(1, keepdim=True), self.block // 8)
        bits = (rows >= 0).view(torch.uint8).view(len(rows), -1, 8)
        packed = bits[..., 0].clone()
        for place in range(1, 8):
            packed |= bits[..., place] << place
        values.copy_(packed)
        return packets

    def decode(self, packets: Tensor) -> Tensor:
        """Returns rows."""
        packed = packets[:, 4:, None]
        bits = (packed >> torch.arange(8, dtype=torch.uint8, device=packets.device)) & 1
        return bits.view(len(packets), -1).float().mul_(2).sub_(1).mul_(scales_of(packets))
