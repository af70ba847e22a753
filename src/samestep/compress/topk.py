"""TopK: the largest gradients only, their places and values; the rest waits until it has grown.

    u = m·u + g        momentum of what is left, so that late gradients point where they would have (m = 0: u = g)
    v = v + u          the residual
    send the k largest of |v|; u and v are 0 there                     (momentum factor masking)

With momentum m here, the optimizer's own must be 0, or it would count twice.

To find the k-th largest of 4 million takes 130 ms; to guess it from a sample and look among those above it 15. The
result is the same: where fewer than k are above the guess, all are looked at.

Source: Y. Lin et al., "Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed Training", ICLR
2018; on memory S. Stich et al., "Sparsified SGD with Memory", NeurIPS 2018.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from samestep.compress.codecs import Codec, is_int
from samestep.errors import UsageError

FIRST = 0.25  # of the elements, when a warm-up begins
_SAMPLED = 16_384  # elements that the guess is made from
_SPARE = 1.3  # times as many as wanted are expected above the guess


@dataclass(frozen=True, kw_only=True)
class TopK(Codec):
    """The largest `fraction` of each piece of up to 1,048,576 elements, 8 bytes each; the rest is kept for later steps.

    Args:
        fraction: of the elements that travel, in (0, 1].
        momentum: of what is kept; set the optimizer's to 0 then.
        warmup: steps in which the fraction falls from 0.25 to its value, by the same factor each.
        feedback: is what makes it converge, and cannot be left out.
    """

    fraction: float = 0.01
    momentum: float = 0.0
    warmup: int = 0
    feedback: Literal[True] = True
    rounds: ClassVar[int] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (isinstance(self.fraction, int | float) and 0 < self.fraction <= 1):
            raise UsageError(f"fraction={self.fraction!r} is no part of the elements: give a number above 0, up to 1")
        if not (isinstance(self.momentum, int | float) and 0 <= self.momentum < 1):
            raise UsageError(f"momentum={self.momentum!r} must be 0 or more, and below 1")
        if not is_int(self.warmup, 0):
            raise UsageError(f"warmup={self.warmup!r} is no number of steps: give a whole number, 0 or more")
        if self.feedback is not True:
            raise UsageError("TopK without feedback would never send what is small: leave feedback out")

    def fraction_at(self, step: int) -> float:
        """Returns the fraction of a step, counted from 0."""
        if step >= self.warmup or self.fraction >= FIRST:
            return self.fraction
        return FIRST * float((self.fraction / FIRST) ** (step / self.warmup))

    def count(self, elements: int, step: int) -> int:
        """Returns how many of so many elements travel in a step."""
        return min(elements, math.ceil(self.fraction_at(step) * elements))


def encode(values: Tensor, places: Tensor) -> Tensor:
    """Returns the packets [k, 8] of bytes of the numbers at some places of [n]: the place and the float32 of each."""
    packets = torch.empty(len(places), 2, dtype=torch.int32, device=values.device)
    packets[:, 0] = places
    packets[:, 1].view(torch.float32).copy_(values[places])
    return packets.view(torch.uint8)


def add_decoded(total: Tensor, packets: Tensor) -> None:
    """Adds the numbers of packets to [n], each at its place."""
    words = packets.view(torch.int32)
    total.index_add_(0, words[:, 0], words[:, 1].view(torch.float32))


def largest_places(values: Tensor, count: int) -> Tensor:
    """Returns where the `count` largest absolute values of [n] are, in ascending order; NaN counts as largest."""
    size, sizes = values.numel(), values.abs()
    if size > 4 * _SAMPLED and count < size // 8:
        sample = sizes[:: size // _SAMPLED]
        above = max(1, math.ceil(_SPARE * count / size * sample.numel()) + 8)
        candidates = (~(sizes < sample.topk(above, sorted=True).values[-1])).nonzero().squeeze(1)  # NaN is one, too
        if candidates.numel() >= count:
            found = sizes[candidates].topk(count, sorted=False).indices
            return candidates[found].sort().values
    return sizes.topk(count, sorted=False).indices.sort().values
