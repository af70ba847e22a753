"""Small messages between ranks: JSON and tensors, on the host.

`all_gather_object` and `broadcast_object_list` of torch.distributed pickle: what arrives can run code. These send
JSON as bytes, and tensors as they are. Every function here is collective: every rank of the axis must call it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from samestep.errors import PeerError
from samestep.runtime.axis import Axis
from samestep.runtime.digest import bytes_of

_Result = TypeVar("_Result")


def all_gather_json(axis: Axis, value: Any) -> list[Any]:
    """Returns every rank's `value`, in rank order, on every rank. Collective."""
    axis.check_open()
    if axis.control is None:
        return [json.loads(json.dumps(value))]
    return [json.loads(_text(data)) for data in _gather_bytes(axis, _bytes(json.dumps(value)))]


def broadcast_json(axis: Axis, value: Any, source: int = 0) -> Any:
    """Returns the `value` of the rank at position `source` of the axis, on every rank. Collective."""
    axis.check_open()
    if axis.control is None:
        return json.loads(json.dumps(value))
    data = _bytes(json.dumps(value)) if axis.rank == source else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor([data.numel()])
    dist.broadcast(size, src=axis.ranks[source], group=axis.control)
    if axis.rank != source:
        data = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(data, src=axis.ranks[source], group=axis.control)
    return json.loads(_text(data))


def raise_on_all_ranks(axis: Axis, problem: Exception | None) -> None:
    """Raises on every rank if any rank has a problem: its own there, elsewhere one naming the rank. Collective.

    So no rank goes on into a collective that a failed one will never reach.
    """
    problems = all_gather_json(axis, None if problem is None else f"{type(problem).__name__}: {problem}")
    if problem is not None:
        raise problem
    for position, message in enumerate(problems):
        if message is not None:
            raise PeerError(f"rank {axis.ranks[position]} failed: {message}")


def run_on_all_ranks(axis: Axis, action: Callable[[], _Result]) -> _Result:
    """Returns what `action` returns here; if it raises on any rank, every rank raises. Collective."""
    problem = None
    try:
        result = action()
    except Exception as error:  # noqa: BLE001  (raised below, here and on every other rank)
        problem = error
    raise_on_all_ranks(axis, problem)
    return result


def all_gather_tensors(axis: Axis, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Returns every rank's tensor, in rank order, on the host of every rank; shapes may differ. Collective."""
    axis.check_open()
    host = tensor.detach().to("cpu").contiguous()
    if axis.control is None:
        return [host.clone()]
    heads = all_gather_json(axis, {"shape": list(host.shape), "dtype": str(host.dtype).removeprefix("torch.")})
    parts = _gather_bytes(axis, bytes_of(host))
    return [
        part.view(getattr(torch, head["dtype"])).reshape(head["shape"]) for head, part in zip(heads, parts, strict=True)
    ]


def _gather_bytes(axis: Axis, data: torch.Tensor) -> list[torch.Tensor]:
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in axis.ranks]
    dist.all_gather(sizes, torch.tensor([data.numel()]), group=axis.control)
    longest = max(int(size) for size in sizes)
    if longest == 0:
        return [data.new_empty(0) for _ in axis.ranks]
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: data.numel()] = data
    rows = [torch.empty_like(padded) for _ in axis.ranks]
    dist.all_gather(rows, padded, group=axis.control)
    return [row[: int(size)].clone() for row, size in zip(rows, sizes, strict=True)]


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def _text(data: torch.Tensor) -> str:
    return data.numpy().tobytes().decode()
