"""What one rank of a pipeline has and all want: what the last stage gives, and the state of the stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.runtime.axis import Axis
from samestep.runtime.exchange import all_gather_json, broadcast_json

__all__: list[str] = []


def told(axis: Axis, source: int, given: Sequence[tuple[Tensor, ...]], device: torch.device) -> Any:
    """Returns the outputs of a batch: a tensor, or several in a tuple, on every rank. Collective over the pipeline.

    Args:
        axis: the pipeline.
        source: the position of the rank of the last stage.
        given: there, the outputs of each micro-batch.
        device: where they are wanted.
    """
    whole = [torch.cat(each).to(device) for each in zip(*given, strict=True)]
    if axis.size > 1:
        forms = [[str(each.dtype).removeprefix("torch."), list(each.shape)] for each in whole]
        forms = broadcast_json(axis, forms, source)
        if axis.rank != source:
            whole = [torch.empty(shape, dtype=getattr(torch, dtype), device=device) for dtype, shape in forms]
        for each in whole:
            dist.broadcast(each, axis.ranks[source], group=axis.group)
    return whole[0] if len(whole) == 1 else tuple(whole)


def on_host(numbers: Sequence[Tensor]) -> Tensor:
    """Returns scalars as one tensor on the host; devices are waited for once for all that lies there in a row.

    >>> on_host([torch.tensor(1.0), torch.tensor(2.0)])
    tensor([1., 2.])
    """
    rows = [torch.stack(list(row)).cpu() for _, row in groupby(numbers, key=lambda each: each.device)]
    return torch.cat(rows) if rows else torch.zeros(0)


def gathered(axis: Axis, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns what all ranks have, under its names, on the host of each. Collective over the pipeline.

    Each tensor travels by itself: beside the result no rank needs memory for more than one.
    """
    forms = [[name, str(each.dtype).removeprefix("torch."), list(each.shape)] for name, each in own.items()]
    found: dict[str, Tensor] = {}
    for source, told_ in zip(axis.ranks, all_gather_json(axis, forms), strict=True):
        for name, dtype, shape in told_:
            if source == axis.ranks[axis.rank]:
                found[name] = own[name].detach().to("cpu", copy=True).contiguous()
            else:
                found[name] = torch.empty(shape, dtype=getattr(torch, dtype))
            if axis.size > 1:
                dist.broadcast(found[name], source, group=axis.control)
    return found
