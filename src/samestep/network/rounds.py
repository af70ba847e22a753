"""Rounds of messages between ranks, small enough to hold for 100,000 ranks: arrays, repeats, and rules.

    Round      sources, targets and bytes as three arrays, and how many times the same round comes
    Shift      every rank r sends as many bytes to rank r + k: three numbers instead
    Exchange   every rank sends as many bytes to every other, all at once: two numbers

A plan (:mod:`samestep.collectives.plan`) lists every message: a ring over 100,000 ranks has 2 x 10^10. :func:`of_plan`
reads one; the functions below it, and :mod:`samestep.network.double_tree`, give the rounds of every all-reduce there is
without a plan, and what is added after each. The tests hold them together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar, cast

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
        adds: bytes that a rank adds of what it has received, behind each of them.
        hidden: it may do so while the next round travels; otherwise that one waits for it.

    Raises:
        UsageError: a message from a rank to itself, or of fewer than 0 bytes.
    """

    sources: Ints
    targets: Ints
    nbytes: Floats
    times: int = 1
    adds: float = 0.0
    hidden: bool = False

    def __post_init__(self) -> None:
        for number in (self.sources == self.targets).nonzero()[0][:1]:
            raise UsageError(f"rank {self.sources[number]} sends to itself: leave the message out")
        for number in (~(self.nbytes >= 0)).nonzero()[0][:1]:
            raise UsageError(f"rank {self.sources[number]} sends {self.nbytes[number]} bytes: give 0 or more")


@dataclass(frozen=True)
class Shift:
    """Every rank r of `ranks` sends `nbytes` to rank (r + distance) mod ranks, `times` times; else as a round."""

    ranks: int
    distance: int
    nbytes: float
    times: int = 1
    adds: float = 0.0
    hidden: bool = False

    def round(self) -> Round:
        """Returns the messages.

        >>> Shift(ranks=3, distance=2, nbytes=8).round().targets.tolist()
        [2, 0, 1]
        """
        import numpy as np

        ranks = np.arange(self.ranks if self.distance % self.ranks else 0)
        targets, sizes = (ranks + self.distance) % self.ranks, np.full(len(ranks), float(self.nbytes))
        return Round(ranks, targets, sizes, self.times, self.adds, self.hidden)


@dataclass(frozen=True)
class Exchange:
    """Every rank sends `nbytes` to every other of its group at once, `times` times; else as a round.

    A group has every `stride`-th rank. With one it is all ranks, in p - 1 shifts side by side.
    """

    ranks: int
    nbytes: float
    times: int = 1
    adds: float = 0.0
    hidden: bool = False
    stride: int = 1

    @property
    def shifts(self) -> int:
        """How many there are side by side."""
        return self.ranks // self.stride - 1

    def round(self) -> Round:
        """Returns the messages, p (p - 1) of them.

        >>> Exchange(ranks=3, nbytes=8).round().targets.tolist()
        [1, 2, 0, 2, 0, 1]
        """
        return self.some(range(1, self.shifts + 1))

    def some(self, distances: Sequence[int]) -> Round:
        """Returns the messages to the members of each group that are so far on.

        >>> Exchange(ranks=4, nbytes=8, stride=2).some([1]).targets.tolist()
        [2, 3, 0, 1]
        """
        import numpy as np

        sources = np.tile(np.arange(self.ranks), len(distances))
        on = np.repeat(np.array(distances, dtype=np.int64), self.ranks)
        targets, sizes = (sources + on * self.stride) % self.ranks, np.full(len(sources), float(self.nbytes))
        return Round(sources, targets, sizes, self.times, self.adds, self.hidden)


Some = Round | Shift | Exchange
_One = TypeVar("_One", bound=Some)
Rule = Callable[[int, float], Iterable[Some]]
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
    yield Shift(ranks, 1, nbytes / ranks, times=ranks - 1, adds=nbytes / ranks)
    yield Shift(ranks, 1, nbytes / ranks, times=ranks - 1)


def segmented_ring(ranks: int, nbytes: float, segments: int = 2) -> Iterator[Shift]:
    """Yields the rounds of :func:`samestep.collectives.segmented.all_reduce`."""
    _check(ranks)
    each, times = nbytes / (ranks * segments), (ranks - 1) * segments
    yield Shift(ranks, 1, each, times, adds=each, hidden=segments > 1)
    yield Shift(ranks, 1, each, times)


def halving_doubling(ranks: int, nbytes: float) -> Iterator[Round]:
    """Yields the rounds of :func:`samestep.collectives.halving.all_reduce`."""
    import numpy as np

    members, idle = _power_of_two(ranks)
    bits = len(members).bit_length() - 1
    yield from _folded(idle, nbytes)
    for number, bit in enumerate([*range(bits), *reversed(range(bits))]):
        partners, share = members[np.arange(len(members)) ^ (1 << bit)], nbytes / (2 << bit)
        yield Round(members, partners, np.full(len(members), share), adds=share if number < bits else 0.0)
    yield from _unfolded(idle, nbytes)


def recursive_doubling(ranks: int, nbytes: float) -> Iterator[Round]:
    """Yields the rounds of :func:`samestep.collectives.doubling.all_reduce`."""
    import numpy as np

    members, idle = _power_of_two(ranks)
    yield from _folded(idle, nbytes)
    for bit in range(len(members).bit_length() - 1):
        partners = members[np.arange(len(members)) ^ (1 << bit)]
        yield Round(members, partners, np.full(len(members), float(nbytes)), adds=float(nbytes))
    yield from _unfolded(idle, nbytes)


def binomial_tree(ranks: int, nbytes: float) -> Iterator[Round]:
    """Yields the rounds of :func:`samestep.collectives.tree.all_reduce`.

    In the last round before the root has everything, somebody must add before sending, unless the ranks are so few
    for the tree's height that only the root has something to add, and does so while it receives.
    """
    import numpy as np

    _check(ranks)
    bits = (ranks - 1).bit_length()
    hidden = 2 < ranks <= 3 << (bits - 2) if bits > 1 else False
    for number, bit in enumerate([*range(bits), *reversed(range(bits))]):
        near = np.arange(0, ranks - (1 << bit), 2 << bit)
        sizes = np.full(len(near), float(nbytes))
        if number < bits:
            late = hidden and number == bits - 2
            yield Round(near + (1 << bit), near, sizes, adds=float(nbytes), hidden=late)
        else:
            yield Round(near, near + (1 << bit), sizes)


def parameter_server(ranks: int, nbytes: float, servers: int = 1) -> Iterator[Round]:
    """Yields the rounds of :func:`samestep.collectives.server.all_reduce`.

    Raises:
        UsageError: not 1 to `ranks` servers.
    """
    import numpy as np

    _check(ranks)
    if not 1 <= servers <= ranks:
        raise UsageError(f"{servers} servers among {ranks} ranks: give 1 to {ranks}")
    share, added = nbytes / servers, (ranks - 1) * nbytes / servers
    if ranks > 1:
        homes = np.arange(servers) * ranks // servers
        home, other = (each.reshape(-1) for each in np.meshgrid(homes, np.arange(ranks), indexing="ij"))
        home, other = home[home != other], other[home != other]
        yield Round(other, home, np.full(len(home), share), adds=added)
        yield Round(home, other, np.full(len(home), share))


def every_server(ranks: int, nbytes: float) -> Iterator[Exchange]:
    """Yields the rounds of :func:`samestep.collectives.server.all_reduce` with a server on every rank."""
    _check(ranks)
    if ranks > 1:
        yield Exchange(ranks, nbytes / ranks, adds=(ranks - 1) * nbytes / ranks)
        yield Exchange(ranks, nbytes / ranks)


def torus(rows: int, columns: int, nbytes: float) -> Iterator[Round | Shift]:
    """Yields the rounds of :func:`samestep.collectives.torus.all_reduce` in one direction.

    With as many columns as a host has ranks, they are those of :func:`samestep.collectives.hierarchical.all_reduce`.
    """
    yield from hierarchical(rows * columns, columns, nbytes, ring)


def hierarchical(
    ranks: int, local: int, nbytes: float, across: Callable[[int, float], Iterable[_One]]
) -> Iterator[Round | _One]:
    """Yields the rounds of :func:`samestep.collectives.hierarchical.all_reduce`.

    Args:
        ranks: in all.
        local: on each host.
        nbytes: of the buffer.
        across: those of the all-reduce between hosts.

    Raises:
        UsageError: the ranks are not the same number on each host.
    """
    import numpy as np

    _check(ranks)
    if local < 1 or ranks % local:
        raise UsageError(f"{ranks} ranks cannot be {local} on each host: give a number that divides {ranks}")
    everyone, share = np.arange(ranks), nbytes / local
    along = everyone // local * local + (everyone + 1) % local
    if local > 1:
        yield Round(everyone, along, np.full(ranks, share), local - 1, adds=share)
    yield from apart(across(ranks // local, share), local)
    if local > 1:
        yield Round(everyone, along, np.full(ranks, share), local - 1)


def apart(rounds: Iterable[_One], stages: int) -> Iterator[_One]:
    """Yields the rounds of `stages` groups at once, of which each has every `stages`-th rank.

    >>> [one.distance for one in apart([Shift(ranks=2, distance=1, nbytes=8)], stages=2)]
    [2]
    """
    for one in rounds:
        yield cast("_One", _apart(one, stages))  # of the same kind


def _apart(one: Some, stages: int) -> Some:
    import numpy as np

    if isinstance(one, Shift):
        return replace(one, ranks=one.ranks * stages, distance=one.distance * stages)
    if isinstance(one, Exchange):
        return replace(one, ranks=one.ranks * stages, stride=one.stride * stages)
    groups = np.arange(stages)
    sources, targets = ((ranks[:, None] * stages + groups).reshape(-1) for ranks in (one.sources, one.targets))
    return replace(one, sources=sources, targets=targets, nbytes=np.repeat(one.nbytes, stages))


def _folded(idle: Ints, nbytes: float) -> Iterator[Round]:
    import numpy as np

    if len(idle):
        yield Round(idle, idle - 1, np.full(len(idle), float(nbytes)), adds=float(nbytes))


def _unfolded(idle: Ints, nbytes: float) -> Iterator[Round]:
    import numpy as np

    if len(idle):
        yield Round(idle - 1, idle, np.full(len(idle), float(nbytes)))


def _power_of_two(ranks: int) -> tuple[Ints, Ints]:
    """The ranks that take part in exchanges, a power of two, and those who are told by their neighbours."""
    import numpy as np

    _check(ranks)
    extra = ranks - (1 << (ranks.bit_length() - 1))
    members = np.concatenate([np.arange(0, 2 * extra, 2), np.arange(2 * extra, ranks)])
    return members, np.arange(1, 2 * extra, 2)


def _check(ranks: int) -> None:
    if ranks < 1:
        raise UsageError(f"a collective over {ranks} ranks: give 1 or more")
