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
[3] A circuit through all hosts: the inner ring is walked in every row, forward or backward, each time one link short
    of all, so that the next row begins one place on or back; forward and backward are mixed so that the end meets the
    beginning. Two rings always allow it, one way or the other; a torus is rings of rings.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np

from samestep.errors import UsageError
from samestep.network.links import Link
from samestep.network.messages import Floats, Ints
from samestep.network.topologies.topology import Hop, LinkTypes, Segments, Size, Topology
from samestep.parsing import whole

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
        >>> torus = Torus(LinkTypes(Link(1e-6, 50e9)), dims=(3, 4))
        >>> print(torus, torus.adjacent(0))
        torus 3x4: 12 hosts, 0 switches, 48 directed links [1, 3, 4, 8]
    """

    dims: tuple[int, ...]
    hosts_are_routers: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.dims:
            raise UsageError("a torus of 0 dimensions has no hosts: give the hosts in each, such as (4, 4)")
        for number, size in enumerate(self.dims):
            whole(1)(size, f"dimension {number} of a torus")

    @cached_property
    def size(self) -> Size:
        """All hosts are on the grid; the diameter is half of every ring."""
        name = f"torus {'x'.join(map(str, self.dims))}" if len(self.dims) > 1 else f"ring of {self.dims[0]}"
        hosts = math.prod(self.dims)
        return Size(name, hosts, hosts, 1, sum(size // 2 for size in self.dims))

    def link_counts(self) -> tuple[tuple[int, Link], ...]:
        """Returns that all links are alike; they are numbered by dimension and way, then by the host they leave."""
        return ((len(self._directions()) * self.hosts, self.link_types.router),)

    def link_ends(self, number: int) -> tuple[int, int]:
        way, host = divmod(number, self.hosts)
        dim, step = self._directions()[way]
        return host, self._stepped(host, dim, step)

    def adjacent(self, router: int) -> list[int]:
        return sorted(self._stepped(router, dim, step) for dim, step in self._directions())

    def hops(self, segments: Segments, *, split: bool) -> Iterator[Hop]:
        """Yields the hops of [1], or of [2]."""
        for arcs in self._arcs(segments, split=split):
            at, way = arcs.begins, self._directions().index((arcs.dim, arcs.step))
            for done in range(int(arcs.lengths.max(initial=0))):
                (going,) = np.nonzero(arcs.lengths > done)
                yield Hop(going, way * self.hosts + at[going], arcs.shares[going])
                at = self._stepped(at, arcs.dim, arcs.step)

    def link_loads(self, segments: Segments, nbytes: Floats, *, split: bool) -> tuple[Floats, Floats]:
        """Returns the bytes on each link and the latency of each segment, arc by arc."""
        ways = self._directions()
        load, hops = np.zeros((len(ways), self.hosts)), np.zeros(len(nbytes))
        for arcs in self._arcs(segments, split=split):
            hops += arcs.lengths * arcs.shares
            load[ways.index((arcs.dim, arcs.step))] += self._covered(arcs, nbytes * arcs.shares)
        return load.reshape(-1), hops * self.link_types.router.latency_s

    def circuit(self) -> list[int]:
        circuit = [0]
        stride = 1
        for size in reversed(self.dims):
            circuit = _closed([host * stride for host in range(size)], circuit)
            stride *= size
        return circuit

    def _directions(self) -> list[tuple[int, int]]:
        """Dimension and step of the links; 2 hosts are joined by one cable, whichever way round."""
        return [(dim, step) for dim, size in enumerate(self.dims) for step in (1, -1)[: min(size, 3) - 1]]

    def _stride(self, dim: int) -> int:
        return math.prod(self.dims[dim + 1 :])

    def _stepped(self, host: Place, dim: int, step: int) -> Place:
        """The host, or hosts, a step on in a dimension."""
        stride, size = self._stride(dim), self.dims[dim]
        here = host // stride % size
        return host + ((here + step) % size - here) * stride

    def _arcs(self, segments: Segments, *, split: bool) -> Iterator[_Arcs]:
        """[1] or [2]: where each way runs in each dimension, one direction after the other."""
        dims = [dim for dim, size in enumerate(self.dims) if size > 1]
        orders = list(permutations(dims)) if split else [tuple(reversed(dims))]
        for order in orders:
            at = segments.begins
            for dim in order:
                stride, size = self._stride(dim), self.dims[dim]
                distance = (segments.ends // stride - at // stride) % size
                even = 0.5 if split and size > 2 else 1.0  # what goes forward where both ways are equally long
                forward = np.where(2 * distance < size, 1.0, np.where(2 * distance == size, even, 0.0)) / len(orders)
                backward = 1 / len(orders) - forward
                yield _Arcs(dim, 1, at, np.where(forward > 0, distance, 0), forward)
                if size > 2:
                    yield _Arcs(dim, -1, at, np.where(forward * len(orders) < 1, size - distance, 0), backward)
                at = at + (segments.ends // stride % size - at // stride % size) * stride

    def _covered(self, arcs: _Arcs, nbytes: Floats) -> Floats:
        """The bytes on each link of one direction: +n where an arc begins, -n behind its end, and a running sum."""
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


def ring(link_types: LinkTypes, hosts: int) -> Torus:
    """Returns a ring: a torus of one dimension.

    >>> ring(LinkTypes(Link(1e-6, 50e9)), 5).adjacent(0)
    [1, 4]
    """
    return Torus(link_types, (hosts,))


def _closed(outer: Sequence[int], inner: Sequence[int]) -> list[int]:
    """[3]: a circuit of the sums of one of each, both of them circuits themselves."""
    if len(outer) % 2 and (len(inner) % 2 == 0 or len(inner) > len(outer)):
        outer, inner = inner, outer
    forward = len(outer) // 2 if len(outer) % 2 == 0 else (len(outer) - len(inner)) // 2
    circuit, at = [], 0
    for row, base in enumerate(outer):
        step = 1 if row < forward else -1
        circuit += [base + inner[(at + step * done) % len(inner)] for done in range(len(inner))]
        at -= step
    return circuit
