"""One axis of ranks: the whole world, or the ranks that share a position on the other axis."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.errors import StepError
from samestep.runtime.scalar_sums import PendingSum, SharedScalars, StepTag, start_reduction


@dataclass(frozen=True)
class HostMap:
    """The ranks of an axis, host by host."""

    hosts: tuple[tuple[int, ...], ...]  # the positions of the ranks that can see each other's processes, in order
    processes: tuple[int, ...]  # the process number of each position

    @property
    def is_one_host(self) -> bool:
        return len(self.hosts) == 1

    def same_host(self, position: int) -> tuple[int, ...]:
        """Returns the positions on the host of `position`, itself among them."""
        return next(host for host in self.hosts if position in host)


@dataclass(eq=False)
class Axis:
    """Some ranks of the world, in order, and the groups through which they communicate.

    Attributes:
        name: "everyone", "data" or "pipeline".
        rank: this process's position on the axis.
        ranks: the global ranks on it, in order.
        group: carries tensors on the world's device; None on an axis of one rank.
        control: carries small host-side messages (gloo), separate from the gradients; None likewise.
        host_map: which of its ranks share a host; None on an axis of one rank.
        inter_host: carries tensors to the ranks at this one's position on the other hosts; None until it is needed.
        scalars: carries one or two numbers through shared memory; None unless all its ranks are on one host.
        tree_sums: sums over the axis are added by one tree, and not as the backend adds: for virtual ranks.
        timeout_s: how long a rank waits for another.
        closed: the world was closed.
    """

    name: str
    rank: int
    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None = field(default=None, repr=False)
    control: dist.ProcessGroup | None = field(default=None, repr=False)
    host_map: HostMap | None = field(default=None, repr=False)
    inter_host: dist.ProcessGroup | None = field(default=None, repr=False)
    scalars: SharedScalars | None = field(default=None, repr=False)
    timeout_s: float = field(default=1800.0, repr=False)
    tree_sums: bool = field(default=False, repr=False)
    closed: bool = field(default=False, repr=False)

    @property
    def size(self) -> int:
        return len(self.ranks)

    def release(self) -> None:
        """Drops the groups, before they are destroyed, and tells the other ranks of this host."""
        if self.scalars is not None:
            self.scalars.leave()
        self.closed = True
        self.group = self.control = self.inter_host = self.scalars = None

    def check_open(self) -> None:
        """Raises StepError where the world was closed and had other ranks: this one would go on by itself."""
        if self.closed and self.size > 1:
            raise StepError(
                f"the world of {self.size} ranks is closed, and each rank would go on alone: move this into the "
                "`with samestep.world()` block"
            )

    def start_sum(self, *values: float, tag: StepTag) -> PendingSum:
        """Starts summing one or two numbers over the ranks. Collective: every rank must call it.

        `tag` says what they are, so that ranks which are out of sync get an error and not a wrong sum.
        """
        self.check_open()
        if self.scalars is not None:
            return self.scalars.send(*values, tag=tag)
        if self.control is None:
            return PendingSum(lambda: values)
        return start_reduction(torch.tensor(values, dtype=torch.float64), self.control, tree=self.tree_sums)

    def start_device_sum(self, values: Tensor) -> PendingSum:
        """Starts summing `values`, 1-dim and on the rank's device. Collective: every rank must call it."""
        if self.group is None:
            return PendingSum(lambda: tuple(values.tolist()))
        return start_reduction(values, self.group, tree=self.tree_sums)

    def __reduce__(self) -> tuple[type[Axis], tuple[str, int, tuple[int, ...]], dict[str, bool]]:
        # A saved model keeps its position, not the connections.
        return (type(self), (self.name, self.rank, self.ranks), {"tree_sums": self.tree_sums, "closed": True})

    def __deepcopy__(self, memo: dict[int, object]) -> Axis:
        # A copy of a model (an average of its weights, say) is on the same axis; a process group has no copy.
        return self


def single_rank_axis(name: str, rank: int = 0) -> Axis:
    return Axis(name=name, rank=0, ranks=(rank,))
