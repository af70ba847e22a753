"""What the last stage gives, told to all ranks of the pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.runtime.axes import Axis
from samestep.runtime.exchange import tell_json

__all__: list[str] = []


def told(axis: Axis, source: int, given: Sequence[tuple[Tensor, ...]], device: torch.device) -> Any:
    """Returns the outputs of a batch: a tensor, or several in a tuple, on every rank. Collective over the pipeline.

    Args:
        axis: the pipeline.
        source: the position of the rank of the last stage.
        given: there, the outputs of each micro-batch.
        device: where they lie.
    """
    whole = [torch.cat(each) for each in zip(*given, strict=True)]
    if axis.size > 1:
        forms = [[str(each.dtype).removeprefix("torch."), list(each.shape)] for each in whole]
        forms = tell_json(axis, forms, source)
        if axis.rank != source:
            whole = [torch.empty(shape, dtype=getattr(torch, dtype), device=device) for dtype, shape in forms]
        for each in whole:
            dist.broadcast(each, axis.ranks[source], group=axis.group)
    return whole[0] if len(whole) == 1 else tuple(whole)
