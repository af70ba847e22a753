"""Rounds of messages between ranks, small enough to hold for 100,000 ranks: arrays, repeats, and rules.

    Round      sources, targets and bytes as three arrays, and how many times the same round comes
    Shift      every rank r sends as many bytes to rank r + k: three numbers instead

A plan (:mod:`samestep.collectives.plan`) lists every message: a ring over 100,000 ranks has 2 x 10^10. :func:`of_plan`
reads one; the functions below it give the rounds of three all-reduces without a plan. The tests hold them together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from samestep.errors import UsageError
from samestep.network import cost

if TYPE_CHECKING:
    from samestep.network.topologies.topology import Floats, Ints

__all__: list[str] = []


@dataclass(frozen=True, eq=False)
class Round:
    """Messages that are sent at once.

    Attributes:
        sources: the rank that each comes from.
        targets: the rank that each goes to.
        nbytes: of each.
        times: how many such rounds there are.

    Raises:
        UsageError: a message from a rank to itself, or of fewer than 0 bytes.
    """

    sources: Ints
    targets: Ints
    nbytes: Floats
    times: int = 1

    def __post_init__(self) -> None:
        for number in (self.sources == self.targets).nonzero()[0][:1]:
            raise UsageError(f"rank {self.sources[number]} sends to itself: leave the message out")
        for number in (~(self.nbytes >= 0)).nonzero()[0][:1]:
            raise UsageError(f"rank {self.sources[number]} sends {self.nbytes[number]} bytes: give 0 or more")


@dataclass(frozen=True)
class Shift:
    """Every rank r of `ranks` sends `nbytes` to rank (r + distance) mod ranks, `times` times."""

    ranks: int
    distance: int
    nbytes: float
    times: int = 1

    def round(self) -> Round:
        """Returns the messages.

        >>> Shift(ranks=3, distance=2, nbytes=8).round().targets.tolist()
        [2, 0, 1]
        """
        import numpy as np

        ranks = np.arange(self.ranks if self.distance % self.ranks else 0)
        return Round(ranks, (ranks + self.distance) % self.ranks, np.full(len(ranks), float(self.nbytes)), self.times)


Messages = Iterable[tuple[int, int, float]]


def of_messages(messages: Messages) -> Round:
    """Returns the round of (source rank, target rank, bytes).

    >>> of_messages([(0, 1, 8), (1, 2, 4)]).nbytes.tolist()
    [8.0, 4.0]
    """
    import numpy as np

    table = np.array([(float(source), float(target), float(size)) for source, target, size in messages])
    table = table.reshape(-1, 3)
    return Round(table[:, 0].astype(np.int64), table[:, 1].astype(np.int64), table[:, 2])


def of_plan(plan: cost.Rounds, nbytes: float) -> Iterator[Round]:
    """Yields the rounds of a plan for a buffer of `nbytes`, cut into equal blocks.

    >>> from samestep.collectives import ring
    >>> [one.nbytes.tolist() for one in of_plan(ring.all_reduce(2), nbytes=8)]
    [[4.0, 4.0], [4.0, 4.0]]
    """
    block = nbytes / plan.blocks
    for messages in plan.rounds:
        yield of_messages((one.source, one.target, block * (one.end - one.begin)) for one in messages)


def ring(ranks: int, nbytes: float) -> Iterator[Shift]:
    """Yields the rounds of :func:`samestep.collectives.ring.all_reduce`."""
    _check(ranks)
    yield Shift(ranks, 1, nbytes / ranks, times=2 * (ranks - 1))


def halving_doubling(ranks: int, nbytes: float) -> Iterator[Round]:
    """Yields the rounds of :func:`samestep.collectives.halving.all_reduce`."""
    import numpy as np

    _check(ranks)
    bits = ranks.bit_length() - 1
    extra = ranks - (1 << bits)
    idle = np.arange(1, 2 * extra, 2)
    members = np.concatenate([np.arange(0, 2 * extra, 2), np.arange(2 * extra, ranks)])
    places = np.arange(len(members))
    if extra:
        yield Round(idle, idle - 1, np.full(extra, float(nbytes)))
    for bit in [*range(bits), *reversed(range(bits))]:
        partners = members[places ^ (1 << bit)]
        yield Round(members, partners, np.full(len(members), nbytes / (2 << bit)))
    if extra:
        yield Round(idle - 1, idle, np.full(extra, float(nbytes)))


def binomial_tree(ranks: int, nbytes: float) -> Iterator[Round]:
    """Yields the rounds of :func:`samestep.collectives.tree.all_reduce`."""
    import numpy as np

    _check(ranks)
    bits = (ranks - 1).bit_length()
    for number, bit in enumerate([*range(bits), *reversed(range(bits))]):
        near = np.arange(0, ranks - (1 << bit), 2 << bit)
        ends = (near + (1 << bit), near)
        sources, targets = ends if number < bits else ends[::-1]
        yield Round(sources, targets, np.full(len(near), float(nbytes)))


def _check(ranks: int) -> None:
    if ranks < 1:
        raise UsageError(f"a collective over {ranks} ranks: give 1 or more")
