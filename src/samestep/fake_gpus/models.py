"""Layers and wrappers of models that look for CUDA's own kernels, or that torch has for GPUs alone: SyncBatchNorm's.

Per channel c, over the n elements of all ranks, x̂ = (x - mean) · invstd and invstd = 1 / sqrt(var + eps):

    forward    y  = x̂ · weight + bias
    backward   dx = (dy - sum(dy)/n - (x - mean) · invstd² · sum(dy · (x - mean))/n) · invstd · weight

Sums are float32 where the input is float16 or bfloat16, as a GPU's are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from samestep.fake_gpus.devices import two_devices
from samestep.fake_gpus.notes import around
from samestep.instrument.patch import Patches

RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")
Maybe = Tensor | None


@around
def _recurrent(compute: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Runs a recurrent layer in host memory, with copies that autograd follows: a GPU's kernels are cuDNN's."""
    found = {tensor.device for tensor in tensors_in(args)}
    cards = [device for device in found if device.type == "cuda"]
    if not cards:
        return compute(*args, **named)
    tensors = [tensor for tensor in tensors_in(args) if tensor.dtype is not torch.int64]  # sizes of a packed sequence
    others = [tensor.device for tensor in tensors if tensor.device not in cards[:1]]
    if others:
        raise two_devices(cards[0], others[0])
    return _moved(compute(*_moved(args, torch.device("cpu")), **named), cards[0])


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in value for tensor in tensors_in(item)] if isinstance(value, list | tuple) else []


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    return type(value)(_moved(item, device) for item in value) if isinstance(value, list | tuple) else value


def _broadcast(tensor: Tensor, cards: Sequence[int]) -> list[Tensor]:
    return [tensor if tensor.get_device() == card else tensor.to(f"cuda:{card}") for card in cards]


def _broadcast_coalesced(tensors: Sequence[Tensor], cards: Sequence[int], _bytes: int) -> list[list[Tensor]]:
    return [list(copies) for copies in zip(*(_broadcast(tensor, cards) for tensor in tensors), strict=True)]


def _scatter(
    tensor: Tensor, cards: Sequence[int], sizes: Sequence[int] | None, dim: int, _streams: Any
) -> list[Tensor]:
    parts = tensor.chunk(len(cards), dim) if sizes is None else tensor.split(list(sizes), dim)  # type: ignore[no-untyped-call]
    return [part.to(f"cuda:{card}") for part, card in zip(parts, cards, strict=False)]


def _gather(tensors: Sequence[Tensor], dim: int, card: int | None) -> Tensor:
    index = torch.cuda.current_device() if card is None else card
    target = torch.device("cpu") if index < 0 else torch.device("cuda", index)
    return torch.cat([tensor.to(target) for tensor in tensors], dim)


@around
def _attention(
    compute: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **named: Any,
) -> Any:
    """Takes flash attention for DTensors, as a GPU does: DTensor has a rule for that, and none for its parts."""
    if type(query) in {Tensor, torch.nn.Parameter} or query.device.type != "cuda" or attn_mask is not None:
        return compute(query, key, value, attn_mask, dropout_p, is_causal, **named)
    if named.pop("enable_gqa", False):
        key, value = (t.repeat_interleave(query.size(-3) // t.size(-3), -3) for t in (key, value))
    flash = torch.ops.aten._scaled_dot_product_flash_attention  # noqa: SLF001
    return flash(query, key, value, dropout_p, is_causal, **named)[0]


def patch_models(patches: Patches) -> None:
    functions: Any = torch._VF  # noqa: SLF001
    for name in RECURRENT:
        patches.set(functions, name, _recurrent(getattr(functions, name)))
    nn: Any = torch.nn.functional
    patches.set(nn, "scaled_dot_product_attention", _attention(nn.scaled_dot_product_attention))
    for copy in (_broadcast, _broadcast_coalesced, _scatter, _gather):  # what DataParallel copies with
        patches.set(torch._C, copy.__name__, copy)  # noqa: SLF001


# --- SyncBatchNorm ----------------------------------------------------------------------------


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
