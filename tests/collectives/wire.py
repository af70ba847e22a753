"""Simulated links between all ranks of a plan, to run the engine in one process.

    late=False    a message is taken when it is sent, and arrives as soon as it is expected
    late=True     a message is taken, and arrives, when it is waited for

The first shows what is sent before it is complete, or arrives in memory still in use; the second, what is changed
while it is on its way.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass

from torch import Tensor

from samestep.collectives import simulate
from samestep.collectives.engine import steps


def run_engine(plan, buffers, *, late):
    """Runs the engine on every rank, in place, all ranks going from round to round together."""
    wire = Wire(late=late)
    ranks = [steps(plan, buffer, wire.end(rank, plan.ranks)) for rank, buffer in enumerate(buffers)]
    for _ in zip(*ranks, strict=True):  # strict: every rank pauses as often, and all run to their end
        pass


def simulated(plan, buffers):
    """What the buffers become by the simplest execution."""
    results = [buffer.clone() for buffer in buffers]
    simulate.run(plan, results)
    return results


@dataclass
class Message:
    sent: Tensor | None = None
    received: Tensor | None = None
    taken: bool = False

    def wait(self):
        if not self.taken:
            assert self.sent is not None, "a rank waits for a message that nobody sends"
            assert self.received is not None, "a rank waits to send what nobody receives"
            self.received.copy_(self.sent)
            self.taken = True


class Wire:
    def __init__(self, *, late=True):
        self.late = late
        self._sent = defaultdict(deque)
        self._expected = defaultdict(deque)

    def end(self, rank, size):
        return End(self, rank, size)

    def send(self, key, tensor):
        message = self._expected[key].popleft() if self._expected[key] else Message()
        if message.received is None:
            self._sent[key].append(message)
        message.sent = tensor if self.late else tensor.clone()
        return self._arrived(message)

    def expect(self, key, tensor):
        message = self._sent[key].popleft() if self._sent[key] else Message()
        if message.sent is None:
            self._expected[key].append(message)
        message.received = tensor
        return self._arrived(message)

    def _arrived(self, message):
        if not self.late and message.sent is not None and message.received is not None:
            message.wait()
        return message


@dataclass(frozen=True)
class End:
    """One rank's transport."""

    wire: Wire
    rank: int
    size: int

    def isend(self, tensor, target, tag):
        return self.wire.send((self.rank, target, tag), tensor)

    def irecv(self, tensor, source, tag):
        return self.wire.expect((source, self.rank, tag), tensor)
