"""Buffers, equal on all ranks where they count: at evaluation and when saving.

DistributedDataParallel broadcasts buffers before each forward in training mode, and so leaves them different after
it: what a rank evaluates or saves then depends on the rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep.runtime.axis import Axis
from samestep.runtime.digest import bytes_of


def sync_buffers(module: nn.Module, axis: Axis) -> None:
    """Gives every rank of `axis` the buffers of its first rank, bit for bit. Collective: every rank must call.

    Needed before evaluation and before saving where buffers may differ: per-rank BatchNorm statistics
    (`batchnorm="local"`), or any buffer that a module updates from its own slice of the batch. With synchronised
    BatchNorm they are equal already and this changes nothing.

    The first rank's and not the mean over ranks, for three reasons: a mean makes no sense of a queue, a codebook, a
    mask or a counter; the mean of three equal floats need not be that float, so constants would move; and what is
    evaluated is then exactly what is saved. The price: local BatchNorm statistics come from 1/N of the samples, and a
    model whose training reads a buffer that differed goes on with the first rank's.
    All buffers are sent, also those that are not persistent, through host memory as one message.
    """
    broadcast_tensors(list(module.buffers()), axis)


@torch.no_grad()
def broadcast_tensors(tensors: Sequence[Tensor], axis: Axis, source: int = 0) -> None:
    """Gives every rank of `axis` these tensors as the one at position `source` has them, in place. Collective."""
    axis.check_open()
    present = [tensor for tensor in tensors if tensor.numel()]
    if axis.size == 1 or not present:
        return
    message = torch.cat([bytes_of(tensor.detach().cpu()) for tensor in present])
    dist.broadcast(message, src=axis.ranks[source], group=axis.control)
    if axis.rank == source:
        return
    for tensor, data in zip(present, torch.split(message, [one.nbytes for one in present]), strict=True):
        tensor.copy_(data.clone().view(tensor.dtype).view(tensor.shape))
