"""How long each round keeps a network busy, for any number of bytes: through its links, and through the ranks' ports.

    through the network      latency of the farthest + bytes of the busiest link     :mod:`samestep.network.contention`
    through a rank's port    its messages one after another, alpha + beta n each     :mod:`samestep.network.cost`

A round lasts as long as the slower of the two. Both are lines over the bytes of the buffer, and where ranks of one host
and of several take part in it there are more than two: all that may be the longest for some number of bytes are kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from samestep.network.cluster import Cluster
from samestep.network.contention import Counter
from samestep.network.rounds import Exchange, Round, Some

if TYPE_CHECKING:
    from samestep.network.topologies.topology import Floats, Ints

    Numbers = Floats | Ints

__all__: list[str] = []


class Line(NamedTuple):
    """Seconds of n bytes.

    Attributes:
        latency_s: of none.
        seconds_per_byte: of each.
    """

    latency_s: float
    seconds_per_byte: float

    def seconds(self, nbytes: float) -> float:
        """Returns how long so many bytes take."""
        return self.latency_s + nbytes * self.seconds_per_byte


class Busy(NamedTuple):
    """A round of a buffer of one byte.

    Attributes:
        lines: of which it lasts as long as the highest.
        alone: seconds a byte through the ranks' ports, as if no link beyond them were shared.
    """

    lines: tuple[Line, ...]
    alone: float


class Ports:
    """Counts the rounds of some ranks of a cluster, those that differ only in their sizes once.

    Args:
        cluster: with what its links cost.
        ranks: of all rounds.

    Raises:
        UsageError: more ranks than the cluster has, or no circuit to place them along.
    """

    def __init__(self, cluster: Cluster, ranks: int) -> None:
        self._cluster = cluster
        self._placement = cluster.place(ranks)
        self._counter = Counter(cluster.topology, self._placement, cluster.routing)
        self._last: deque[tuple[Some, Busy]] = deque(maxlen=4)  # a double tree's two come in turn, over and over

    def busy(self, one: Some) -> Busy:
        """Returns how long a round takes; an object that was among the last few is not looked at again."""
        for other, found in self._last:
            if other is one:
                return found
        self._last.append((one, self._count(one)))
        return self._last[-1][1]

    def _count(self, one: Some) -> Busy:
        parts, largest = self._counter.parts(one)
        through = [Line(part.latency_s, part.transfer_s * largest) for part in parts]
        ports = list(self._ports(one))
        return Busy(highest([*through, *ports]), max((line.seconds_per_byte for line in ports), default=0.0))

    def _ports(self, one: Some) -> Iterator[Line]:
        if isinstance(one, Exchange):
            yield from self._of_exchange(one)
        elif isinstance(one, Round):
            yield from self._of_messages(one)
        elif self._cluster.devices > 1:
            yield from self._of_messages(one.round())
        elif one.distance % one.ranks:
            across = self._cluster.links.across()
            yield Line(across.latency_s, one.nbytes / across.bytes_per_s)

    def _of_messages(self, one: Round) -> Iterator[Line]:
        """What each rank sends, and what it receives."""
        import numpy as np

        hosts, ranks = self._placement.array, self._placement.ranks
        across = hosts[one.sources] != hosts[one.targets]
        both = np.stack([np.bincount(ends[across], minlength=ranks) for ends in (one.sources, one.targets)])
        left = np.where(both.min(axis=0) > 1, self._cluster.links.crowded, 1.0)
        for ends in (one.sources, one.targets):
            near, far = (np.bincount(ends[mine], minlength=ranks) for mine in (~across, across))
            near_bytes, far_bytes = (np.bincount(ends[mine], one.nbytes[mine], ranks) for mine in (~across, across))
            yield from self._lines(near, near_bytes, far, far_bytes / left)

    def _of_exchange(self, one: Exchange) -> Iterator[Line]:
        """To all members of the group but itself, some of them on its host."""
        import numpy as np

        members = np.arange(one.ranks) % one.stride + self._placement.array * one.stride
        inside = np.unique(members, return_inverse=True, return_counts=True)
        near = inside[2][inside[1]] - 1.0
        far = one.shifts - near
        left = np.where(far > 1, self._cluster.links.crowded, 1.0)
        yield from self._lines(near, near * one.nbytes, far, far * one.nbytes / left)

    def _lines(self, near: Numbers, near_bytes: Numbers, far: Numbers, far_bytes: Numbers) -> Iterator[Line]:
        """Messages inside the host and beyond it, and their bytes, of every rank: the highest line for each slope."""
        import numpy as np

        inside, across = self._cluster.links.inside, self._cluster.links.across()
        latencies = near * inside.latency_s + far * across.latency_s
        slopes = near_bytes / inside.bytes_per_s + far_bytes / across.bytes_per_s
        if not near.any() and not far.any():
            return
        steepest = slopes == slopes.max()
        if latencies[steepest].max() == latencies.max():
            yield Line(float(latencies.max()), float(slopes.max()))
            return
        different, places = np.unique(slopes, return_inverse=True)
        highest = np.zeros(len(different))
        np.maximum.at(highest, places, latencies)
        yield from map(Line, highest.tolist(), different.tolist())


def highest(lines: Iterable[Line]) -> tuple[Line, ...]:
    """Returns the lines of which no other is above for every number of bytes, the steepest first.

    >>> highest([Line(1.0, 2.0), Line(3.0, 1.0), Line(2.0, 1.0), Line(0.5, 2.0)])
    (Line(latency_s=1.0, seconds_per_byte=2.0), Line(latency_s=3.0, seconds_per_byte=1.0))
    """
    kept: list[Line] = []
    for line in sorted(lines, key=lambda line: (-line.seconds_per_byte, -line.latency_s)):
        if not kept or line.latency_s > kept[-1].latency_s:
            kept.append(line)
    return tuple(kept)
