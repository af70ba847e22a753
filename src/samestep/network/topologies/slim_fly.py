"""Slim Fly: nearly as many switches as can be within two hops of each other, the McKay-Miller-Siran graphs.

    q = 4w + d a prime power, d in {-1, 0, 1}, over the field F = GF(q) with primitive element x

    half 0: q columns of q switches (0, a, b)         (0, a, b) ─ (0, a, b')  iff  b - b' in X
    half 1: the same                (1, m, c)         (1, m, c) ─ (1, m, c')  iff  c - c' in X'
    between them                                      (0, a, b) ─ (1, m, c)   iff  b = m a + c

              X                                                X'
    d =  1    x^0, x^2, ..., x^(q-3)                           x^1, x^3, ..., x^(q-2)
    d =  0    x^0, x^2, ..., x^(q-2)                           x^1, x^3, ..., x^(q-1)
    d = -1    x^0, x^2, ..., x^(2w-2), x^(2w-1), x^(2w+1),     x times each of X
              ..., x^(4w-3)

2q^2 switches of (3q - d)/2 links each, any two at most 2 hops apart. Every prime power but 2 is 4w + d for a w of 1 or
more: 3, 4, 5, 7, 8, 9, 11, 13, 16, 17, 19, 23, 25, 27, 29, 31, 32, ... Half as many hosts as links on each switch is
what keeps the network as quick as its ports.

[1] Two switches of one half, in different columns: one way, by the only line through two points.
[2] In one column, without a link: by a + b = difference, both in X; one way for every such pair.
[3] In different halves, without a link: within the first's column, or within the second's, or both.

Sources: B. McKay, M. Miller and J. Siran, "A note on large graphs of diameter two and given maximum degree", JCTB 74,
1998; P. Hafner, "Geometric realisation of the graphs of McKay-Miller-Siran", JCTB 90, 2004; M. Besta and T. Hoefler,
"Slim Fly: a cost effective low-diameter network topology", SC 2014.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from samestep.errors import UsageError
from samestep.network.links import Link
from samestep.network.topologies.field import Field, field, near, prime_power
from samestep.network.topologies.topology import Hop, Legs, Topology, whole

if TYPE_CHECKING:
    from samestep.network.topologies.topology import Ints

__all__: list[str] = []

MOST = 128  # of q: 32,768 switches; beyond it the tables of the field, quadratic in q, take seconds to make


@dataclass(frozen=True)
class SlimFly(Topology):
    """The MMS graph of q, with hosts on every switch.

    Attributes:
        q: a prime power, 3 to 128.
        p: hosts on each switch; half its links to others, rounded up, where 0.

    Raises:
        UsageError: q is no such number; says which are next to it.

    Example:
        >>> from samestep.network.topologies.cables import Cables
        >>> print(SlimFly(Cables(Link(1e-6, 25e9)), q=5))
        Slim Fly q=5 p=4: 200 hosts, 50 switches, 750 directed links
    """

    q: int
    p: int = 0

    def __post_init__(self) -> None:
        whole(self.q, "q of a Slim Fly", 3, MOST)
        whole(self.p, "p, the hosts on a Slim Fly's switch,", 0)
        if not prime_power(self.q):
            raise UsageError(
                f"there is no Slim Fly of q = {self.q}: give a prime power, such as {near(self.q, least=3)}"
            )

    @property
    def name(self) -> str:
        """What it is."""
        return f"Slim Fly q={self.q} p={self.concentration}"

    @property
    def delta(self) -> int:
        """d: -1, 0 or 1."""
        return (self.q + 1) % 4 - 1

    @property
    def degree(self) -> int:
        """Links of a switch to other switches, one way."""
        return (3 * self.q - self.delta) // 2

    @property
    def hosts(self) -> int:
        """On all switches."""
        return self.routers * self.concentration

    @property
    def routers(self) -> int:
        """In both halves."""
        return 2 * self.q * self.q

    @property
    def concentration(self) -> int:
        """Hosts on a switch."""
        return self.p or -(-self.degree // 2)

    @property
    def diameter(self) -> int:
        """Of every MMS graph."""
        return 2

    @cached_property
    def field(self) -> Field:
        """GF(q)."""
        return field(self.q)

    @cached_property
    def generators(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """X and X'."""
        q, w, powers = self.q, (self.q - self.delta) // 4, self.field.powers
        exponents = list(range(0, q - 1, 2))
        if self.delta == -1:
            exponents = [*range(0, 2 * w, 2), *range(2 * w - 1, 4 * w - 2, 2)]
        return (
            tuple(powers[each] for each in exponents),
            tuple(powers[(each + 1) % (q - 1)] for each in exponents),
        )

    def fabric(self) -> tuple[tuple[int, Link], ...]:
        """Returns that all are alike; numbered by the switch that they leave, those within its column first."""
        return ((self.routers * self.degree, self.cables.between),)

    def wire(self, number: int) -> tuple[int, int]:
        """Returns the switches at the ends of a link."""
        router, port = divmod(number, self.degree)
        return router, self.adjacent(router)[port]

    def adjacent(self, router: int) -> list[int]:
        """Returns the switches of its column, then those of the other half."""
        q, field = self.q, self.field
        column, here = divmod(router, q)
        half, a = divmod(column, q)
        inside = [column * q + field.sums[here][step] for step in self.generators[half]]
        if half:  # (1, a, here): all (0, b, a b + here)
            return inside + [b * q + field.sums[field.products[a][b]][here] for b in range(q)]
        return inside + [(q + m) * q + field.difference(here, field.products[m][a]) for m in range(q)]

    def between(self, legs: Legs, *, every: bool) -> Iterator[Hop]:
        """Yields the hops: none, one, or two by [1], [2] or [3]."""
        import numpy as np

        straight = self._link(legs.begins, legs.ends)
        (near,) = np.nonzero(straight >= 0)
        yield Hop(near, straight[near], np.ones(len(near)))
        (far,) = np.nonzero((straight < 0) & (legs.begins != legs.ends))
        begins, ends = legs.begins[far], legs.ends[far]
        middles, counts = self._middles(begins, ends)
        if every:
            row, column = np.nonzero(np.arange(middles.shape[1]) < counts[:, None])
        else:
            row, column = np.arange(len(far)), legs.keys[far] % np.maximum(counts, 1)
        middle, shares = middles[row, column], 1 / counts[row] if every else np.ones(len(row))
        yield Hop(far[row], self._link(begins[row], middle), shares)
        yield Hop(far[row], self._link(middle, ends[row]), shares)

    @cached_property
    def _tables(self) -> _Tables:
        return _Tables.of(self)

    def _link(self, begins: Ints, ends: Ints) -> Ints:
        """The number of the link between two switches, or -1 where there is none."""
        import numpy as np

        q, t = self.q, self._tables
        column, other = begins // q, ends // q
        inside = t.port[column // q, t.minus[ends % q, begins % q]]
        crossing = np.where(self._offset(begins, ends) == 0, len(self.generators[0]) + other % q, -1)
        port = np.where(column == other, inside, np.where(column // q == other // q, -1, crossing))
        return np.where(port < 0, -1, begins * self.degree + port)

    def _offset(self, one: Ints, other: Ints) -> Ints:
        """Of (0, a, b) and (1, m, c), whichever is `one`: b - (m a + c), 0 where they are neighbours."""
        import numpy as np

        q, t = self.q, self._tables
        low, high = np.minimum(one, other), np.maximum(one, other)
        line = t.plus[t.times[high // q % q, low // q % q], high % q]
        offset: Ints = t.minus[low % q, line]
        return offset

    def _middles(self, begins: Ints, ends: Ints) -> tuple[Ints, Ints]:
        """The switches between two that are two hops apart, a row for each pair, and how many there are."""
        import numpy as np

        q, t = self.q, self._tables
        column, other = begins // q, ends // q
        inside = column == other
        across = column // q != other // q
        difference = t.minus[ends % q, begins % q]
        middles = column[:, None] * q + t.plus[(begins % q)[:, None], t.ways[column // q, difference]]  # [2]
        counts = np.where(inside, t.counts[column // q, difference], 1)
        middles[:, 0] = np.where(inside | across, middles[:, 0], self._crossing(begins, ends))
        offset = self._offset(begins, ends)
        in_first, in_second = t.port[0, offset] >= 0, t.port[1, offset] >= 0
        low, high = np.minimum(begins, ends), np.maximum(begins, ends)
        by_first = low // q * q + t.minus[low % q, offset]  # [3] the switch of the first's column that `high` knows
        by_second = high // q * q + t.plus[high % q, offset]
        middles[:, 0] = np.where(across, np.where(in_first, by_first, by_second), middles[:, 0])
        middles[:, 1] = np.where(across, by_second, middles[:, 1])
        return middles, np.where(across, in_first.astype(int) + in_second, counts)

    def _crossing(self, one: Ints, other: Ints) -> Ints:
        """[1]: the line through (a, b) and (a', b'), m = (b - b') / (a - a'), or where two lines meet."""
        import numpy as np

        q, t = self.q, self._tables
        half, x, y = one // (q * q), one // q % q, one % q
        slope = t.times[t.minus[y, other % q], t.inverse[t.minus[x, other // q % q]]]
        m_or_a = np.where(half == 0, slope, t.negative[slope])
        product = t.times[m_or_a, x]
        router: Ints = ((1 - half) * q + m_or_a) * q + np.where(half == 0, t.minus[y, product], t.plus[product, y])
        return router


@dataclass(frozen=True)
class _Tables:
    """The field and the generators as arrays; `ways[half, d]` are the a with a and d - a in X, `port` where in X."""

    plus: Any
    minus: Any
    times: Any
    negative: Any
    inverse: Any
    port: Any
    ways: Any
    counts: Any

    @classmethod
    def of(cls, fly: SlimFly) -> _Tables:
        import numpy as np

        plus, times = np.array(fly.field.sums), np.array(fly.field.products)
        negative = np.array(fly.field.negatives)
        inverse = np.array([0, *map(fly.field.inverse, range(1, fly.q))])
        port = np.full((2, fly.q), -1)
        for half, steps in enumerate(fly.generators):
            port[half, list(steps)] = range(len(steps))
        found = [
            [
                [a for a in steps if fly.field.difference(d, a) in steps] if d and d not in steps else []
                for d in range(fly.q)
            ]
            for steps in map(list, fly.generators)
        ]
        counts = np.array([[len(ways) for ways in half] for half in found])
        widest = max(2, int(counts.max()))
        ways = np.array([[ways + [0] * (widest - len(ways)) for ways in half] for half in found])
        return cls(plus, plus[:, negative], times, negative, inverse, port, ways, counts)
