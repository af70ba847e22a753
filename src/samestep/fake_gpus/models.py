"""Layers and wrappers of models that look for CUDA's own kernels, or that torch has for GPUs alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from samestep.fake_gpus.kernels import two_devices
from samestep.instrument.patch import Patches

RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")


def _recurrent(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Runs a recurrent layer in host memory, with copies that autograd follows: a GPU's kernels are cuDNN's."""

    def run(*args: Any, **named: Any) -> Any:
        found = {tensor.device for tensor in _tensors(args)}
        cards = [device for device in found if device.type == "cuda"]
        if not cards:
            return compute(*args, **named)
        others = [tensor.device for tensor in _tensors(args) if tensor.device not in cards[:1] and not _sizes(tensor)]
        if others:
            raise two_devices(cards[0], others[0])
        return _moved(compute(*_moved(args, torch.device("cpu")), **named), cards[0])

    return run


def _sizes(tensor: Tensor) -> bool:
    """Returns whether it is the batch sizes of a packed sequence, which stay in host memory."""
    return tensor.dtype is torch.int64


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, list | tuple) else []


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


def _attention(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Takes flash attention for DTensors, as a GPU does: DTensor has a rule for that, and none for its parts."""

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **named: Any,
    ) -> Tensor:
        if type(query) in {Tensor, torch.nn.Parameter} or query.device.type != "cuda" or attn_mask is not None:
            return compute(query, key, value, attn_mask, dropout_p, is_causal, **named)
        if named.pop("enable_gqa", False):
            key, value = (t.repeat_interleave(query.size(-3) // t.size(-3), -3) for t in (key, value))
        flash = torch.ops.aten._scaled_dot_product_flash_attention  # noqa: SLF001
        output: Tensor = flash(query, key, value, dropout_p, is_causal, **named)[0]
        return output

    return attend


COPIES = {  # what DataParallel copies with
    "_broadcast": _broadcast,
    "_broadcast_coalesced": _broadcast_coalesced,
    "_scatter": _scatter,
    "_gather": _gather,
}


def patch_models(patches: Patches) -> None:
    """Replaces what looks for kernels of CUDA."""
    functions: Any = torch._VF  # noqa: SLF001
    for name in RECURRENT:
        patches.set(functions, name, _recurrent(getattr(functions, name)))
    nn: Any = torch.nn.functional
    patches.set(nn, "scaled_dot_product_attention", _attention(nn.scaled_dot_product_attention))
    for name, copy in COPIES.items():
        patches.set(torch._C, name, copy)  # noqa: SLF001
