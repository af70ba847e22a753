"""The kernels of SyncBatchNorm, which PyTorch has for GPUs alone.

Per channel c, over the n elements of all ranks, x̂ = (x - mean) · invstd and invstd = 1 / sqrt(var + eps):

    forward    y  = x̂ · weight + bias
    backward   dx = (dy - sum(dy)/n - (x - mean) · invstd² · sum(dy · (x - mean))/n) · invstd · weight

Sums are float32 where the input is float16 or bfloat16, as a GPU's are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Maybe = Tensor | None


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in {torch.float16, torch.bfloat16} else tensor


def _dims(tensor: Tensor) -> list[int]:
    return [dim for dim in range(tensor.dim()) if dim != 1]


def _channels(values: Tensor, like: Tensor) -> Tensor:
    return values.view([1, -1] + [1] * (like.dim() - 2))


def _stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    variance, mean = torch.var_mean(_wide(x), _dims(x), correction=0)
    return mean, torch.rsqrt(variance + eps)


def _gather_stats(
    _x: Tensor, means: Tensor, invstds: Tensor, mean: Maybe, var: Maybe, momentum: float, eps: float, counts: Tensor
) -> tuple[Tensor, Tensor]:
    weights = counts.view(-1, 1).to(means.dtype)  # [ranks, 1]; means and invstds are [ranks, channels]
    total = weights.sum()
    new_mean = (means * weights).sum(0) / total
    new_var = ((invstds.pow(-2) - eps + (means - new_mean).square()) * weights).sum(0) / total
    if mean is not None:
        mean.mul_(1 - momentum).add_(momentum * new_mean)
    if var is not None:
        var.mul_(1 - momentum).add_(momentum * new_var * total / (total - 1))
    return new_mean, torch.rsqrt(new_var + eps)


def _elements(x: Tensor, weight: Maybe, bias: Maybe, mean: Tensor, invstd: Tensor, _eps: float) -> Tensor:
    y = (_wide(x) - _channels(mean, x)) * _channels(invstd, x)
    y = y if weight is None else y * _channels(weight, x)
    return (y if bias is None else y + _channels(bias, x)).to(x.dtype)


def _backward_sums(
    dy: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Maybe, _for_x: bool, for_weight: bool, for_bias: bool
) -> tuple[Maybe, ...]:
    dims, wide = _dims(x), _wide(dy)
    sum_dy, sum_dy_xmu = wide.sum(dims), (wide * (_wide(x) - _channels(mean, x))).sum(dims)
    kind = dy.dtype if weight is None else weight.dtype
    d_weight = (sum_dy_xmu * invstd).to(kind) if for_weight else None
    return sum_dy, sum_dy_xmu, d_weight, sum_dy.to(kind) if for_bias else None


def _backward_elements(
    dy: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Maybe, sum_dy: Tensor, sum_xmu: Tensor, counts: Tensor
) -> Tensor:
    total = counts.sum()
    slope = invstd.square() * sum_xmu / total
    centred = _wide(dy) - _channels(sum_dy / total, x) - (_wide(x) - _channels(mean, x)) * _channels(slope, x)
    scale = invstd if weight is None else invstd * weight
    return (centred * _channels(scale, x)).to(dy.dtype)


SYNCHRONISED: dict[str, Callable[..., Any]] = {
    "batch_norm_stats": _stats,
    "batch_norm_gather_stats_with_counts": _gather_stats,
    "batch_norm_elemt": _elements,
    "batch_norm_backward_reduce": _backward_sums,
    "batch_norm_backward_elemt": _backward_elements,
}
