"""A sum over ranks that is on its way while the computation goes on.

`torch.distributed.all_reduce` spends about as long in its Python wrapper as gloo does on a single number; a step pays
for that every time. So the group is called directly. What a small sum costs grows with its length: measured with two
ranks on two cores, one float64 took 0.12 ms of processor time, two 0.19, four 0.37.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

__all__: list[str] = []


@dataclass
class PendingSum:
    """A reduction under way, in place in `values`."""

    values: Tensor
    work: dist.Work | None

    def wait(self) -> Tensor:
        """Returns the sum, once it has arrived. Not collective: a rank may wait alone, or never."""
        if self.work is not None:
            self.work.wait()
            self.work = None
        return self.values


def start_sum(values: Tensor, group: dist.ProcessGroup | None) -> PendingSum:
    """Starts summing `values`, in place, over the ranks of `group`. Collective: every rank must call it."""
    return PendingSum(values, None if group is None else group.allreduce([values]))
