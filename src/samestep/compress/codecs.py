"""Codecs: how rows of numbers become fewer bytes, and numbers again.

A codec is a frozen dataclass with its settings, and pure mathematics on tensors; it knows nothing of ranks. Gradients
come as rows of `block` elements, each of which is coded by itself into a packet of the same length, so that any rank
can take any row:

    rows      [R, block]   float32         encode           packets   [R, bytes]   uint8
    g0 g1 ... g511                 ─────────────────────▶   scale | q0 q1 ... q511          (int8: 4 + 512 bytes)
              [R, block]   float32         decode

:class:`Plain` loses nothing; exempt tensors travel by it.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from samestep.errors import UsageError

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
    rounds: ClassVar[int] = 2  #: messages, one after another, that a sum takes
    cuts: ClassVar[bool] = True  #: whether a tensor may be cut into pieces

    def __post_init__(self) -> None:
        if not is_int(self.exempt, 0):
            raise UsageError(f"exempt={self.exempt!r} is no number of elements: give a whole number, 0 or more")

    @property
    def name(self) -> str:
        return type(self).__name__

    def declared(self) -> dict[str, Any]:
        """Returns all that shapes the result, as JSON."""
        return {"codec": self.name, **dataclasses.asdict(self)}

    def takes(self, shape: torch.Size) -> bool:
        """Whether a tensor of this shape is compressed."""
        return len(shape) > 1 and shape.numel() >= max(self.exempt, 1)

    def check_dtype(self, name: str, dtype: torch.dtype) -> None:
        """Refuses gradients that it cannot code.

        Args:
            name: the parameter's.
            dtype: its gradient's.

        Raises:
            UsageError: it is complex, say.
        """
        if dtype not in (torch.float32, *HALVES):
            raise UsageError(
                f"{self.name} codes float32, float16 and bfloat16, and {name} is {str(dtype).removeprefix('torch.')}: "
                "train in one of these, or leave compress out"
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
        if not is_int(self.block, 8) or self.block % 8:
            raise UsageError(f"block={self.block!r} is no length of rows: give a multiple of 8, such as 512")

    @property
    def needs_noise(self) -> bool:
        """Whether `encode` needs noise."""
        return False

    @abstractmethod
    def encode(self, rows: Tensor, noise: Tensor | None = None) -> Tensor:
        """Returns packets, [R, bytes] of uint8; the bytes are a multiple of 4.

        A row that has NaN or Inf is decoded with NaN or Inf in it, so that it is not overlooked.

        Args:
            rows: [R, block] of float32; not changed.
            noise: [R, block], uniform in [0, 1), where it is needed.
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

    def encode(self, rows: Tensor, noise: Tensor | None = None) -> Tensor:  # noqa: ARG002
        return rows.contiguous().view(torch.uint8)

    def decode(self, packets: Tensor) -> Tensor:
        return packets.view(torch.float32)


@dataclass(frozen=True, kw_only=True)
class _Half(RowCodec):
    feedback: bool = False  # rounding loses less than the noise of a batch

    def check_dtype(self, name: str, dtype: torch.dtype) -> None:
        super().check_dtype(name, dtype)
        if dtype in HALVES:
            raise UsageError(f"{self.name} saves nothing where gradients have 2 bytes already, as {name} has: try Int8")


@dataclass(frozen=True, kw_only=True)
class Float16(_Half):
    """float16 with a scale for each row: half the bytes.

    The error is at most 2^-11 of each number, or 2^-39 of the row's largest.

    float16 ends at 65504 and begins at 6e-8, and gradients lie on both sides. Each row is multiplied by a power of two
    that brings its largest element between 2^14 and 2^15, which loses nothing by itself; PyTorch's fp16 hook casts as
    it is, and adds in float16, where a sum overflows that a mean would not.

    Example:
        >>> codec = Float16(block=8)
        >>> codec.decode(codec.encode(torch.full((1, 8), 3 * 2.0**100)))[0, 0].item() == 3 * 2.0**100
        True
    """

    def encode(self, rows: Tensor, noise: Tensor | None = None) -> Tensor:  # noqa: ARG002
        exponents = torch.frexp(_largest(rows)).exponent.clamp_(min=-100)  # so that the factor is finite
        one = torch.ones_like(exponents, dtype=torch.float32)
        packets, values = _with_scales(torch.ldexp(one, exponents - 15), 2 * self.block)  # 15: float16's largest
        values.view(torch.float16).copy_(rows * torch.ldexp(one, 15 - exponents))
        return packets

    def decode(self, packets: Tensor) -> Tensor:
        return packets[:, 4:].view(torch.float16).float().mul_(_scales(packets))


@dataclass(frozen=True, kw_only=True)
class BFloat16(_Half):
    """bfloat16: half the bytes, an error of at most 2^-9 of each number. PyTorch's hook for it needs a GPU."""

    def encode(self, rows: Tensor, noise: Tensor | None = None) -> Tensor:  # noqa: ARG002
        return rows.to(torch.bfloat16).view(torch.uint8)

    def decode(self, packets: Tensor) -> Tensor:
        return packets.view(torch.bfloat16).float()


@dataclass(frozen=True, kw_only=True)
class Int8(RowCodec):
    """int8 with a scale for each row of `block` elements: a quarter of the bytes.

        scale = max |x| / 126         q = floor(x / scale + u)     u uniform in [0, 1): the mean of q · scale is x
                                      q = round(x / scale)         nearest: half the error, and a bias

    126 and not 127: x / scale + u stays below 127 however it is rounded, so nothing has to be clamped.

    Source: D. Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization", NeurIPS 2017, with the
    largest element for the norm, row by row; on scales by blocks T. Dettmers, "8-Bit Approximations for Parallelism in
    Deep Learning", ICLR 2016.

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
        return self.rounding == "stochastic"

    def encode(self, rows: Tensor, noise: Tensor | None = None) -> Tensor:
        scales = _largest(rows).div_(126)
        scales[scales < 1e-35 / 126] = 0.0  # which have no reciprocal
        packets, values = _with_scales(scales, self.block)
        factors = torch.where(scales > 0, 1 / scales, scales)  # NaN stays NaN
        if self.needs_noise:
            assert noise is not None, "stochastic rounding needs noise"
            levels = torch.addcmul(noise, rows, factors).floor_()
        else:
            levels = (rows * factors).round_()
        values.view(torch.int8).copy_(levels.nan_to_num_(0.0))
        return packets

    def decode(self, packets: Tensor) -> Tensor:
        return packets[:, 4:].view(torch.int8) * _scales(packets)


@dataclass(frozen=True, kw_only=True)
class Sign(RowCodec):
    """The sign of each element, times the mean absolute value of its row: 1 bit an element.

    Without error feedback it does not converge; with it, it does. Sources: J. Bernstein et al., "signSGD: Compressed
    Optimisation for Non-Convex Problems", ICML 2018; S. P. Karimireddy et al., "Error Feedback Fixes SignSGD and other
    Gradient Compression Schemes", ICML 2019 (the scale).

    Example:
        >>> codec = Sign(block=32)
        >>> codec.decode(codec.encode(torch.tensor([[4.0, -2.0] * 16])))[0, :3].tolist()
        [3.0, -3.0, 3.0]
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block % 32:
            raise UsageError(f"block={self.block} does not fit Sign, which packs signs: give a multiple of 32")

    def encode(self, rows: Tensor, noise: Tensor | None = None) -> Tensor:  # noqa: ARG002
        packets, values = _with_scales(rows.abs().mean(1, keepdim=True), self.block // 8)
        bits = (rows >= 0).view(torch.uint8).view(len(rows), -1, 8)
        packed = bits[..., 0].clone()
        for place in range(1, 8):
            packed |= bits[..., place] << place
        values.copy_(packed)
        return packets

    def decode(self, packets: Tensor) -> Tensor:
        packed = packets[:, 4:, None]
        bits = (packed >> torch.arange(8, dtype=torch.uint8, device=packets.device)) & 1
        return bits.view(len(packets), -1).float().mul_(2).sub_(1).mul_(_scales(packets))


def is_int(value: Any, least: int) -> bool:
    """Whether a setting is a whole number, `least` or more."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _with_scales(scales: Tensor, values: int) -> tuple[Tensor, Tensor]:
    """Returns packets of a float32 scale, [R, 1], and so many bytes of values, and the part for the values."""
    packets = torch.empty(len(scales), 4 + values, dtype=torch.uint8, device=scales.device)
    packets[:, :4].view(torch.float32).copy_(scales)
    return packets, packets[:, 4:]


def _scales(packets: Tensor) -> Tensor:
    return packets[:, :4].view(torch.float32)


def _largest(rows: Tensor) -> Tensor:
    """Returns the largest absolute value of each row, [R, 1]; NaN where there is one."""
    return torch.maximum(rows.amax(1, keepdim=True), rows.amin(1, keepdim=True).neg_())  # 2.4 ms for 4 M; abs() 3.6
