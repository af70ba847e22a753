"""A line of ranks: the whole world, or the ranks that share a position on one of its axes."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch.distributed as dist

from samestep.errors import StepError
from samestep.runtime.mailbox import Mailbox

__all__: list[str] = []


@dataclass(frozen=True)
class Neighbours:
    """The ranks of an axis, host by host.

    Attributes:
        hosts: the positions on the axis of those that see each other, in order; nobody is on two.
        processes: the process number of each position.
    """

    hosts: tuple[tuple[int, ...], ...]
    processes: tuple[int, ...]

    @property
    def is_one_host(self) -> bool:
        """Whether everybody sees everybody."""
        return len(self.hosts) == 1

    def beside(self, position: int) -> tuple[int, ...]:
        """Returns the positions on the host of `position`, itself among them."""
        return next(host for host in self.hosts if position in host)


@dataclass(eq=False)
class Axis:
    """Some ranks of the world, in order, and the groups they talk through.

    Attributes:
        name: "everyone", "data" or "pipeline".
        rank: this process's position on the axis.
        ranks: the global ranks on it, in order.
        group: carries tensors on the world's device; None where there is nobody to talk to.
        control: carries small host-side messages (gloo), apart from the gradients; None likewise.
        neighbours: which of its ranks stand on one host; None where there is but one rank.
        across: carries tensors to the ranks in this one's place on the other hosts; None until it is wanted.
        mailbox: carries a few numbers through shared memory; None unless all its ranks are on one host.
        by_tree: sums over the axis are added by one tree, not as the backend would: for virtual ranks.
        timeout_s: how long a rank waits for another.
        closed: the world was closed; there is nobody to talk to any more.
    """

    name: str
    rank: int
    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None = field(default=None, repr=False)
    control: dist.ProcessGroup | None = field(default=None, repr=False)
    neighbours: Neighbours | None = field(default=None, repr=False)
    across: dist.ProcessGroup | None = field(default=None, repr=False)
    mailbox: Mailbox | None = field(default=None, repr=False)
    timeout_s: float = field(default=1800.0, repr=False)
    by_tree: bool = field(default=False, repr=False)
    closed: bool = field(default=False, repr=False)

    @property
    def size(self) -> int:
        """The number of ranks on the axis."""
        return len(self.ranks)

    def release(self) -> None:
        """Forgets the groups, before they are destroyed, and tells the others of this host."""
        if self.mailbox is not None:
            self.mailbox.leave()
        self.closed = True
        self.group = self.control = self.across = self.mailbox = None

    def check_open(self) -> None:
        """Refuses to go on alone where there were others.

        Raises:
            StepError: the world was closed.
        """
        if self.closed and self.size > 1:
            raise StepError(
                f"the world of {self.size} ranks is closed, and each rank would go on alone: move this into the "
                "`with samestep.world()` block"
            )

    def __reduce__(self) -> tuple[type[Axis], tuple[str, int, tuple[int, ...]], dict[str, bool]]:
        # A saved model keeps its place, not the connections.
        return (type(self), (self.name, self.rank, self.ranks), {"by_tree": self.by_tree, "closed": True})

    def __deepcopy__(self, memo: dict[int, object]) -> Axis:
        # A copy of a model (an average of its weights, say) stands on the same axis; a process group has no copy.
        return self


def alone(name: str, rank: int = 0) -> Axis:
    """Returns the axis of a rank that has nobody beside it."""
    return Axis(name=name, rank=0, ranks=(rank,))
