"""The transport between real ranks: send and recv of torch.distributed, on tensors in host memory.

The group's own methods are called: `dist.isend` translates ranks and checks arguments on every message, which takes
longer than a small message does, and it knows only groups that it made itself. Gloo queues sends and receives for each
pair of ranks and tag in the order they were posted (`gloo/transport/tcp/pair.cc`), so rounds never mix, however far
one rank is ahead.

NCCL is refused: its messages would have to be grouped, and on GPUs it chooses among algorithms of its own, in kernels.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from samestep.collectives.engine import Work


class PointToPoint:
    """A transport among the ranks of a process group, which must carry host memory (gloo, MPI).

    Args:
        group: its ranks are counted from 0, in the group's order.
        first_tag: of the messages; above it no other messages may be under way in this group at the same time.

    Example:
        >>> group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
        >>> PointToPoint(group).size
        1
    """

    def __init__(self, group: dist.ProcessGroup, first_tag: int = 0) -> None:
        self._group = group
        self._first_tag = first_tag
        self.rank: int = group.rank()
        self.size: int = group.size()

    def isend(self, tensor: Tensor, target: int, tag: int) -> Work:
        """Begins to send."""
        return self._group.send([tensor], target, self._first_tag + tag)

    def irecv(self, tensor: Tensor, source: int, tag: int) -> Work:
        """Begins to receive."""
        return self._group.recv([tensor], source, self._first_tag + tag)
