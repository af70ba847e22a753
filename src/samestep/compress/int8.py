"""A quarter of the bytes: int8 with a scale for each row.

    scale = max |x| / 126         q = floor(x / scale + u)     u uniform in [0, 1): the mean of q · scale is x
                                  q = round(x / scale)         nearest: half the error, and a bias

126 and not 127: x / scale + u stays below 127 however it is rounded, so nothing has to be clamped.

Source: D. Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization", NeurIPS 2017, with the
largest element for the norm, row by row; on scales by blocks T. Dettmers, "8-Bit Approximations for Parallelism in Deep
Learning", ICLR 2016.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from samestep.compress.codec import RowCodec, largest, scales_of, with_scales
from samestep.errors import UsageError

__all__ = ["Int8"]

LEVELS = 126
_LEAST = 1e-35  # of a row's largest element; smaller ones are 0, for their scale has no reciprocal


@dataclass(frozen=True, kw_only=True)
class Int8(RowCodec):
    """int8 with a scale for each row of `block` elements: a quarter of the bytes.

    Args:
        rounding: "stochastic", without bias, or "nearest", with half the error.

    Example:
        >>> rows = torch.tensor([[126.0, -63.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0]])
        >>> codec = Int8(block=8, rounding="nearest")
        >>> codec.decode(codec.encode(rows)).tolist()[0][:4]
        [126.0, -63.0, 0.0, 1.0]
    """

    rounding: Literal["stochastic", "nearest"] = "stochastic"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rounding not in ("stochastic", "nearest"):
            raise UsageError(f"rounding={self.rounding!r} is unknown: use 'stochastic' or 'nearest'")

    @property
    def needs_noise(self) -> bool:
        """Whether it rounds by chance."""
        return self.rounding == "stochastic"

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's packet."""
        return 4 + self.block

    def encode(self, rows: Tensor, noise: Tensor | None = None) -> Tensor:
        """Returns packets."""
        scales = largest(rows).div_(LEVELS)
        scales[scales < _LEAST / LEVELS] = 0.0
        packets, values = with_scales(scales, self.block)
        factors = torch.where(scales > 0, 1 / scales, scales)  # NaN stays NaN
        if self.needs_noise:
            assert noise is not None, "stochastic rounding needs noise"
            levels = torch.addcmul(noise, rows, factors).floor_()
        else:
            levels = (rows * factors).round_()
        values.view(torch.int8).copy_(levels.nan_to_num_(0.0))
        return packets

    def decode(self, packets: Tensor) -> Tensor:
        """Returns rows."""
        return packets[:, 4:].view(torch.int8) * scales_of(packets)
