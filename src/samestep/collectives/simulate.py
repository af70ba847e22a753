"""All ranks of a plan in one process: the engine on simulated links, and the plain way to compare it with.

64 ranks take milliseconds here, so properties are tested on many and confirmed on few real ones. Links come in two
kinds, and a rank that relied on either would be found out:

    late=False    a message is taken when it is sent, and arrives as soon as it is expected
    late=True     a message is taken, and arrives, when it is waited for

The first shows what is sent before it is complete, or arrives in memory still in use; the second, what is changed
while it is on its way.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from samestep.collectives.engine import steps
from samestep.collectives.plan import Plan, execute
from samestep.errors import UsageError

__all__: list[str] = []


def run(plan: Plan, buffers: Sequence[Tensor], *, late: bool = True) -> None:
    """Runs the engine on every rank, in place, all ranks going from round to round together.

    Args:
        plan: over `len(buffers)` ranks.
        buffers: one a rank, each of shape (elements,).
        late: which kind of links.

    Raises:
        UsageError: not one buffer a rank, or one that is not flat.

    Example:
        >>> from samestep.collectives import ring
        >>> buffers = [torch.tensor([1, 2, 3]), torch.tensor([10, 20, 30])]
        >>> run(ring.all_reduce(2), buffers)
        >>> buffers
        [tensor([11, 22, 33]), tensor([11, 22, 33])]
    """
    _check(plan, buffers)
    wire = Wire(late=late)
    ranks = [steps(plan, buffer, wire.end(rank, plan.ranks)) for rank, buffer in enumerate(buffers)]
    for _ in zip(*ranks, strict=True):  # strict: every rank pauses as often, and all run to their end
        pass


def plainly(plan: Plan, buffers: Sequence[Tensor]) -> list[Tensor]:
    """Returns what the buffers become, by :func:`samestep.collectives.plan.execute`; the oracle of the engine.

    >>> from samestep.collectives import tree
    >>> plainly(tree.reduce(2), [torch.tensor([1.5]), torch.tensor([2.0])])
    [tensor([3.5000]), tensor([2.])]
    """
    _check(plan, buffers)
    edges = plan.edges(buffers[0].numel())
    blocks = [[buffer[edges[at] : edges[at + 1]] for at in range(plan.blocks)] for buffer in buffers]
    return [torch.cat(row) for row in execute(plan, blocks)]


def _check(plan: Plan, buffers: Sequence[Tensor]) -> None:
    if len(buffers) != plan.ranks:
        raise UsageError(f"{plan.name} is a plan over {plan.ranks} ranks, and here are {len(buffers)} buffers")
    if len({(buffer.dtype, tuple(buffer.shape)) for buffer in buffers}) > 1:
        raise UsageError(f"{plan.name}: the buffers differ in dtype or shape: make them alike on every rank")


@dataclass
class Message:
    """On its way from the memory it was sent from to the memory it is received in; either may not be known yet."""

    sent: Tensor | None = None
    received: Tensor | None = None
    taken: bool = False

    def wait(self) -> None:
        """Takes the message, once."""
        if not self.taken:
            assert self.sent is not None, "a rank waits for a message that nobody sends"
            assert self.received is not None, "a rank waits to send what nobody receives"
            self.received.copy_(self.sent)
            self.taken = True


class Wire:
    """Links between all ranks of a simulation.

    Args:
        late: messages are taken, and arrive, when they are waited for.
    """

    def __init__(self, *, late: bool = True) -> None:
        self.late = late
        self._sent: dict[tuple[int, int, int], deque[Message]] = defaultdict(deque)
        self._expected: dict[tuple[int, int, int], deque[Message]] = defaultdict(deque)

    def end(self, rank: int, size: int) -> End:
        """Returns the transport of one rank."""
        return End(self, rank, size)

    def send(self, key: tuple[int, int, int], tensor: Tensor) -> Message:
        """Matches the first message expected under a key (source, target, tag), or leaves it to be expected."""
        message = self._expected[key].popleft() if self._expected[key] else Message()
        if message.received is None:
            self._sent[key].append(message)
        message.sent = tensor if self.late else tensor.clone()
        return self._arrived(message)

    def expect(self, key: tuple[int, int, int], tensor: Tensor) -> Message:
        """Matches the first message sent under a key, or leaves it to be sent."""
        message = self._sent[key].popleft() if self._sent[key] else Message()
        if message.sent is None:
            self._expected[key].append(message)
        message.received = tensor
        return self._arrived(message)

    def _arrived(self, message: Message) -> Message:
        if not self.late and message.sent is not None and message.received is not None:
            message.wait()
        return message


@dataclass(frozen=True)
class End:
    """One rank's transport; made by :class:`Wire`."""

    wire: Wire = field(repr=False)
    rank: int
    size: int

    def isend(self, tensor: Tensor, target: int, tag: int) -> Message:
        """Begins to send."""
        return self.wire.send((self.rank, target, tag), tensor)

    def irecv(self, tensor: Tensor, source: int, tag: int) -> Message:
        """Begins to receive."""
        return self.wire.expect((source, self.rank, tag), tensor)
