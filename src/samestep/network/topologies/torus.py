"""Torus: hosts on a grid whose rows and columns are closed to rings, in any number of dimensions; no switches.

        ┌──────────────────┐          dims (3, 4): host 4 y + x stands at (y, x); the last dimension changes
      ┌─0 ── 1 ── 2 ── 3 ─┐│          fastest. 2 links a dimension, each way its own; a dimension of 2 has
      │ │    │    │    │  ││          one link, of 1 none.
      │ 4 ── 5 ── 6 ── 7 ─┼┤
      │ │    │    │    │  ││          1 dimension is a ring, 2 and 3 are what TPUs and Blue Gene are made of.
      └ 8 ── 9 ── 10 ─ 11 ┘┘

[1] Dimension order: a message goes along the last dimension first, the shorter way round (forward where both are
    equal), then along the one before it. Every way is one arc on one ring a dimension, so a round is counted in time
    proportional to its messages, not to their hops: +n where an arc begins, -n where it ends, and a running sum.
[2] Split evenly: over all orders of the dimensions, and both ways round where they are equally long. A torus has many
    more shortest ways, staircases; real ones go in dimension order (or two of them: O1TURN, Seo et al., ISCA 2005).
[3] Every host sends to that k further on: it moves by the digits of k, and by one more in a dimension into which those
    behind it carried. All hosts of one ring move alike, so its links carry as many bytes as the arc has links.
[4] A circuit through all hosts: the inner ring is walked in every row, forward or backward, each time one link short
    of all, so that the next row begins one place on or back; forward and backward are mixed so that the end meets the
    beginning. Two rings always allow it, one way or the other; a torus is rings of rings.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

from samestep.errors import UsageError
from samestep.network.links import Link
from samestep.network.topologies.cables import Cables
from samestep.network.topologies.topology import Hop, Legs, Topology, Turn, whole

if TYPE_CHECKING:
    from samestep.network.topologies.topology import Floats, Ints

__all__: list[str] = []

Place = TypeVar("Place", int, Any)  # one host, or an array of them


class _Arcs(NamedTuple):
    """The part of each way in one dimension and one direction: `lengths` links from `begins`, `shares` of the bytes."""

    dim: int
    step: int
    begins: Ints
    lengths: Ints
    shares: Floats


@dataclass(frozen=True)
class Torus(Topology):
    """Rings crossing each other.

    Attributes:
        dims: hosts in each dimension, the fastest last.

    Raises:
        UsageError: no dimension, or fewer than 1 host in one.

    Example:
        >>> torus = Torus(Cables(Link(1e-6, 50e9)), dims=(3, 4))
        >>> print(torus, torus.neighbours(0))
        torus 3x4: 12 hosts, 0 switches, 48 directed links [1, 3, 4, 8]
    """

    dims: tuple[int, ...]
    direct: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.dims:
            raise UsageError("a torus of 0 dimensions has no hosts: give the hosts in each, such as (4, 4)")
        for number, size in enumerate(self.dims):
            whole(size, f"dimension {number} of a torus", 1)

    @property
    def name(self) -> str:
        """What it is."""
        return f"torus {'x'.join(map(str, self.dims))}" if len(self.dims) > 1 else f"ring of {self.dims[0]}"

    @property
    def hosts(self) -> int:
        """All on the grid."""
        return math.prod(self.dims)

    @property
    def routers(self) -> int:
        """The hosts."""
        return self.hosts

    @property
    def concentration(self) -> int:
        """Each its own."""
        return 1

    @property
    def diameter(self) -> int:
        """Half of every ring."""
        return sum(size // 2 for size in self.dims)

    def fabric(self) -> tuple[tuple[int, Link], ...]:
        """Returns that all links are alike; they are numbered by dimension and way, then by the host they leave."""
        return ((len(self._ways()) * self.hosts, self.cables.between),)

    def wire(self, number: int) -> tuple[int, int]:
        """Returns the hosts at the ends of a link."""
        way, host = divmod(number, self.hosts)
        dim, step = self._ways()[way]
        return host, self._stepped(host, dim, step)

    def adjacent(self, router: int) -> list[int]:
        """Returns the next and the previous host in each dimension."""
        return sorted(self._stepped(router, dim, step) for dim, step in self._ways())

    def between(self, legs: Legs, *, every: bool) -> Iterator[Hop]:
        """Yields the hops of [1], or of [2]."""
        import numpy as np

        for arcs in self._arcs(legs, every=every):
            at, way = arcs.begins, self._ways().index((arcs.dim, arcs.step))
            for done in range(int(arcs.lengths.max(initial=0))):
                (going,) = np.nonzero(arcs.lengths > done)
                yield Hop(going, way * self.hosts + at[going], arcs.shares[going])
                at = self._stepped(at, arcs.dim, arcs.step)

    def tally(self, legs: Legs, nbytes: Floats, *, every: bool) -> tuple[Floats, Floats]:
        """Returns the bytes on each link and the latency of each leg, arc by arc."""
        import numpy as np

        ways = self._ways()
        load, hops = np.zeros((len(ways), self.hosts)), np.zeros(len(nbytes))
        for arcs in self._arcs(legs, every=every):
            hops += arcs.lengths * arcs.shares
            load[ways.index((arcs.dim, arcs.step))] += self._covered(arcs, nbytes * arcs.shares)
        return load.reshape(-1), hops * self.cables.between.latency_s

    def turn(self, distance: int) -> Turn:
        """Returns [3], exactly."""
        rest, link = distance % self.hosts, self.cables.between
        hops, loads = {0: 0}, []  # most hops so far of those who carry, or do not
        for size in reversed(self.dims):
            rest, digit = divmod(rest, size)
            moved = {carried: min((digit + carried) % size, -(digit + carried) % size) for carried in hops}
            loads.append((float(max(moved.values())), link))
            after: dict[int, int] = {}
            for carried, before in hops.items():
                for carries in range(digit + carried == size, 1 + (digit + carried > 0)):
                    after[carries] = max(after.get(carries, 0), before + moved[carried])
            hops = after
        return Turn(max(hops.values()) * link.latency_s, tuple(loads))

    def circuit(self) -> list[int]:
        """Returns [4]."""
        circuit = [0]
        stride = 1
        for size in reversed(self.dims):
            circuit = _closed([host * stride for host in range(size)], circuit)
            stride *= size
        return circuit

    def _ways(self) -> list[tuple[int, int]]:
        """Dimension and step of the links; 2 hosts are joined by one cable, whichever way round."""
        return [(dim, step) for dim, size in enumerate(self.dims) for step in (1, -1)[: min(size, 3) - 1]]

    def _stride(self, dim: int) -> int:
        return math.prod(self.dims[dim + 1 :])

    def _stepped(self, host: Place, dim: int, step: int) -> Place:
        """The host, or hosts, a step on in a dimension."""
        stride, size = self._stride(dim), self.dims[dim]
        here = host // stride % size
        return host + ((here + step) % size - here) * stride

    def _arcs(self, legs: Legs, *, every: bool) -> Iterator[_Arcs]:
        """[1] or [2]: where each way runs in each dimension, one direction after the other."""
        import numpy as np

        dims = [dim for dim, size in enumerate(self.dims) if size > 1]
        orders = list(permutations(dims)) if every else [tuple(reversed(dims))]
        for order in orders:
            at = legs.begins
            for dim in order:
                stride, size = self._stride(dim), self.dims[dim]
                ahead = (legs.ends // stride - at // stride) % size
                even = 0.5 if every and size > 2 else 1.0  # what goes forward where both ways are equally long
                forward = np.where(2 * ahead < size, 1.0, np.where(2 * ahead == size, even, 0.0)) / len(orders)
                backward = 1 / len(orders) - forward
                yield _Arcs(dim, 1, at, np.where(forward > 0, ahead, 0), forward)
                if size > 2:
                    yield _Arcs(dim, -1, at, np.where(forward * len(orders) < 1, size - ahead, 0), backward)
                at = at + (legs.ends // stride % size - at // stride % size) * stride

    def _covered(self, arcs: _Arcs, nbytes: Floats) -> Floats:
        """The bytes on each link of one direction: +n where an arc begins, -n behind its end, and a running sum."""
        import numpy as np

        stride, size = self._stride(arcs.dim), self.dims[arcs.dim]
        (mine,) = np.nonzero(arcs.lengths)
        at, length, nbytes = arcs.begins[mine], arcs.lengths[mine], nbytes[mine]
        here = at // stride % size
        begin = here if arcs.step == 1 else (here - length + 1) % size
        end = begin + length
        row = at // (stride * size) * (size + 1) * stride + at % stride
        steps = np.zeros(self.hosts // size * (size + 1))
        over = end > size  # goes on at the ring's beginning
        for place, sign in ((begin, 1), (np.minimum(end, size), -1), (np.where(over, 0, size), 1)):
            steps += sign * np.bincount(row + place * stride, nbytes, len(steps))
        steps -= np.bincount(row + np.where(over, end - size, size) * stride, nbytes, len(steps))
        return steps.reshape(-1, size + 1, stride).cumsum(axis=1)[:, :size].reshape(-1)


def ring(cables: Cables, hosts: int) -> Torus:
    """Returns a ring: a torus of one dimension.

    >>> ring(Cables(Link(1e-6, 50e9)), 5).neighbours(0)
    [1, 4]
    """
    return Torus(cables, (hosts,))


def _closed(outer: Sequence[int], inner: Sequence[int]) -> list[int]:
    """[4]: a circuit of the sums of one of each, both of them circuits themselves."""
    if len(outer) % 2 and (len(inner) % 2 == 0 or len(inner) > len(outer)):
        outer, inner = inner, outer
    forward = len(outer) // 2 if len(outer) % 2 == 0 else (len(outer) - len(inner)) // 2
    circuit, at = [], 0
    for row, base in enumerate(outer):
        step = 1 if row < forward else -1
        circuit += [base + inner[(at + step * done) % len(inner)] for done in range(len(inner))]
        at -= step
    return circuit
