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
    members, idle = _power_of_two(ranks)
    bits = len(members).bit_length() - 1
    places = np.arange(len(members))
    if len(idle):
        yield Round(idle, idle - 1, np.full(len(idle), float(nbytes)))
    for bit in [*range(bits), *reversed(range(bits))]:
        partners = members[places ^ (1 << bit)]
        yield Round(members, partners, np.full(len(members), nbytes / (2 << bit)))
    if len(idle):
        yield Round(idle - 1, idle, np.full(len(idle), float(nbytes)))


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


def segmented_ring(ranks: int, nbytes: float, segments: int = 2) -> Iterator[Shift]:
    """Yields the rounds of :func:`samestep.collectives.segmented.all_reduce`."""
    _check(ranks)
    yield Shift(ranks, 1, nbytes / (ranks * segments), times=2 * (ranks - 1) * segments)


def recursive_doubling(ranks: int, nbytes: float) -> Iterator[Round]:
    """Yields the rounds of :func:`samestep.collectives.doubling.all_reduce`."""
    import numpy as np

    _check(ranks)
    members, idle = _power_of_two(ranks)
    if len(idle):
        yield Round(idle, idle - 1, np.full(len(idle), float(nbytes)))
    places = np.arange(len(members))
    for bit in range(len(members).bit_length() - 1):
        yield Round(members, members[places ^ (1 << bit)], np.full(len(members), float(nbytes)))
    if len(idle):
        yield Round(idle - 1, idle, np.full(len(idle), float(nbytes)))


def torus(rows: int, columns: int, nbytes: float) -> Iterator[Round]:
    """Yields the rounds of :func:`samestep.collectives.torus.all_reduce` in one direction.

    With as many columns as a host has ranks, they are those of :func:`samestep.collectives.hierarchical.all_reduce`.
    """
    import numpy as np

    _check(rows * columns)
    ranks = np.arange(rows * columns)
    row, column = np.divmod(ranks, columns)
    along, down = row * columns + (column + 1) % columns, (row + 1) % rows * columns + column
    wide, small = np.full(len(ranks), nbytes / columns), np.full(len(ranks), nbytes / columns / rows)
    if columns > 1:
        yield Round(ranks, along, wide, times=columns - 1)
    if rows > 1:
        yield Round(ranks, down, small, times=2 * (rows - 1))
    if columns > 1:
        yield Round(ranks, along, wide, times=columns - 1)


def parameter_server(ranks: int, nbytes: float) -> Iterator[Round]:
    """Yields the rounds of :func:`samestep.collectives.server.all_reduce` with one server."""
    import numpy as np

    _check(ranks)
    others, server = np.arange(1, ranks), np.zeros(ranks - 1, dtype=np.int64)
    for sources, targets in ((others, server), (server, others)):
        yield Round(sources, targets, np.full(ranks - 1, float(nbytes)))


def apart(rounds: Iterable[Round | Shift], stages: int) -> Iterator[Round]:
    """Yields the rounds of `stages` groups at once, of which each has every `stages`-th rank.

    >>> [one.sources.tolist() for one in apart([Shift(ranks=2, distance=1, nbytes=8)], stages=2)]
    [[0, 2, 1, 3]]
    """
    import numpy as np

    for one in rounds:
        each = one.round() if isinstance(one, Shift) else one
        sources, targets = (
            np.concatenate([rank * stages + stage for stage in range(stages)]) for rank in (each.sources, each.targets)
        )
        yield Round(sources, targets, np.tile(each.nbytes, stages), each.times)


def _power_of_two(ranks: int) -> tuple[Ints, Ints]:
    """The ranks that take part in exchanges, a power of two, and those who are told by their neighbours."""
    import numpy as np

    extra = ranks - (1 << (ranks.bit_length() - 1))
    members = np.concatenate([np.arange(0, 2 * extra, 2), np.arange(2 * extra, ranks)])
    return members, np.arange(1, 2 * extra, 2)


def _check(ranks: int) -> None:
    if ranks < 1:
        raise UsageError(f"a collective over {ranks} ranks: give 1 or more")
