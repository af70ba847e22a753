"""Count, mean and spread of each channel, taken from parts of a batch and merged exactly.

PyTorch's nn.SyncBatchNorm gathers mean and 1/sqrt(var + eps) and recovers the variance from them, which loses
digits where the variance is small beside eps; a sum of squares loses them where the mean is large beside the
spread. Here each part keeps M2, the sum of squared distances from its own mean, and parts are merged by the rule of
Chan, Golub and LeVeque (1983, "Algorithms for computing the sample variance: analysis and recommendations"):

    mean = sum(n_i mean_i) / n        M2 = sum(M2_i + n_i (mean_i - mean)**2)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.runtime.axes import Axis

__all__: list[str] = []


@dataclass(frozen=True)
class Moments:
    """Count of values per channel, their mean (C), and M2 (C): the sum of squared distances from the mean."""

    count: int
    mean: Tensor
    m2: Tensor


def local_moments(x: Tensor) -> Moments:
    """Moments of this rank's batch, float64 whatever the input; all zero for an empty batch.

    The mean is summed in float64 and the squares are taken after subtracting it. (PyTorch's own kernel for
    channels-last float32 sums naively: with a mean of 1e4 and 2e5 values its variance is off by a factor of 50.)
    """
    channels = x.size(1)
    count = x.numel() // channels if channels else 0
    if count == 0:
        nothing = torch.zeros(channels, dtype=torch.float64, device=x.device)
        return Moments(0, nothing, nothing)
    mean = x.sum(all_but_channels(x), dtype=torch.float64) / count
    x = x.to(accumulation_dtype(x.dtype))
    centred = x - per_channel(mean.to(x.dtype), x)
    return Moments(count, mean, centred.square_().sum(all_but_channels(x)).double())


def merge_moments(parts: list[Moments]) -> Moments:
    """Moments of the union of `parts`, added in the order given; parts may be empty."""
    count = sum(part.count for part in parts)
    total = torch.stack([part.mean * part.count for part in parts]).sum(0)
    mean = total / max(count, 1)
    spread = [part.m2 + part.count * (part.mean - mean).square() for part in parts]
    return Moments(count, mean, torch.stack(spread).sum(0))


def gather_moments(local: Moments, axis: Axis) -> Moments:
    """Moments of the batches of all ranks, the same bits on each. Collective: every rank must call."""
    row = torch.cat([local.mean.new_tensor([local.count]), local.mean, local.m2])
    channels = local.mean.numel()
    return merge_moments(
        [Moments(int(other[0]), other[1 : channels + 1], other[channels + 1 :]) for other in gather_rows(row, axis)]
    )


def gather_rows(row: Tensor, axis: Axis) -> list[Tensor]:
    """Every rank's row, in rank order; rows are equally long. Collective: every rank must call."""
    axis.check_open()
    rows = [torch.empty_like(row) for _ in range(axis.size)]
    dist.all_gather(rows, row, group=axis.group)
    return rows


def all_but_channels(x: Tensor) -> list[int]:
    """The dims of (n, C, ...) that a statistic of each channel runs over."""
    return [dim for dim in range(x.dim()) if dim != 1]


def per_channel(values: Tensor, like: Tensor) -> Tensor:
    """`values` (C) as (1, C, 1, ...), to be combined with `like` (n, C, ...)."""
    return values.view(1, -1, *[1] * (like.dim() - 2))


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, float32 for all that is narrower."""
    return torch.float64 if dtype == torch.float64 else torch.float32
