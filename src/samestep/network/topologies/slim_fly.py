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

The field, for any prime power q:

    GF(4) = GF(2)[x] / (x^2 + x + 1)         an element is a polynomial over GF(p), written as a number in base p
      0      0                                 0, 1, x, x + 1  =  00, 01, 10, 11  =  0, 1, 2, 3
      x^0    1     = 1
      x^1    x     = 2                       x is primitive: its powers are all elements but 0,
      x^2    x + 1 = 3                       so a product is a sum of exponents

q = p is counting modulo p; q = p^k is not counting modulo q, where p divides 0 and nothing has an inverse (a Slim Fly
made so has a diameter above 2). The polynomial is the first of degree k of which x is primitive; one always exists.

Sources: B. McKay, M. Miller and J. Siran, "A note on large graphs of diameter two and given maximum degree", JCTB 74,
1998; P. Hafner, "Geometric realisation of the graphs of McKay-Miller-Siran", JCTB 90, 2004; M. Besta and T. Hoefler,
"Slim Fly: a cost effective low-diameter network topology", SC 2014; R. Lidl and H. Niederreiter, "Finite Fields", 2nd
edition, 1997, chapters 2 and 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from samestep.errors import UsageError
from samestep.network.links import Link
from samestep.network.messages import Ints
from samestep.network.topologies.topology import Hop, Segments, Size, Topology
from samestep.parsing import whole

MOST = 128  # of q: 32,768 switches; beyond it the tables of the field, quadratic in q, take seconds to make


@dataclass(frozen=True, eq=False)
class Field:
    """GF(q), whose elements are the numbers 0 to q - 1, by tables."""

    powers: Ints  # of the primitive element, from its 0th to its (q - 2)nd
    add: Ints  # `add[a, b]`
    neg: Ints  # `neg[a]` added to a is 0
    mul: Ints  # `mul[a, b]`
    inverse: Ints  # `inverse[a]` times a is 1; 0 for 0, which has none

    @cached_property
    def sub(self) -> Ints:
        return self.add[:, self.neg]


def field(q: int) -> Field:
    """Returns GF(q).

    >>> field(4).powers.tolist(), int(field(9).add[4, 5])
    ([1, 2, 3], 6)

    Raises:
        UsageError: q is not a prime power.
    """
    factors = prime_power(q)
    if factors is None:
        raise UsageError(f"there is no field of {q} elements: give a prime power, such as {nearest_prime_powers(q)}")
    prime, degree = factors
    place = prime ** np.arange(degree)
    digits = np.arange(q)[:, None] // place % prime
    powers = next(np.array(some) @ place for lower in digits if len(some := _powers(lower.tolist(), prime)) == q - 1)
    exponent = np.zeros(q, dtype=np.int64)
    exponent[powers] = np.arange(q - 1)
    mul = powers[(exponent[:, None] + exponent) % (q - 1)]
    mul[0] = mul[:, 0] = 0
    inverse = powers[-exponent % (q - 1)]
    inverse[0] = 0
    return Field(powers, (digits[:, None] + digits) % prime @ place, -digits % prime @ place, mul, inverse)


def prime_power(q: int) -> tuple[int, int] | None:
    """Returns p and k where q = p^k, or None where q is no prime power.

    >>> prime_power(27), prime_power(12), prime_power(1)
    ((3, 3), None, None)
    """
    prime = next((factor for factor in range(2, int(q**0.5) + 1) if q % factor == 0), q) if q > 1 else 0
    degree = 0
    while prime and q % prime == 0:
        q, degree = q // prime, degree + 1
    return (prime, degree) if degree and q == 1 else None


def nearest_prime_powers(q: int, least: int = 2) -> str:
    """Returns the prime powers next to q, from `least` on, in words.

    >>> nearest_prime_powers(12), nearest_prime_powers(1)
    ('11 or 13', '2')
    """
    below = next((each for each in range(q - 1, least - 1, -1) if prime_power(each)), None)
    above = next(each for each in range(max(q + 1, least), 2 * max(q, least) + 2) if prime_power(each))
    return f"{above}" if below is None else f"{below} or {above}"


def _powers(lower: Sequence[int], prime: int) -> list[tuple[int, ...]]:
    """1, x, x^2, ... until one comes again or is 0, modulo the polynomial x^k + `lower`."""
    power: tuple[int, ...] = (1, *[0] * (len(lower) - 1))
    seen: dict[tuple[int, ...], None] = {}
    while any(power) and power not in seen:
        seen[power] = None
        carry = power[-1]  # x^k is -lower
        power = tuple((a - carry * b) % prime for a, b in zip((0, *power[:-1]), lower, strict=True))
    return list(seen)


@dataclass(frozen=True)
class SlimFly(Topology):
    """The MMS graph of q, with hosts on every switch.

    Attributes:
        q: a prime power, 3 to 128.
        p: hosts on each switch; half its links to others, rounded up, where 0.

    Raises:
        UsageError: q is no such number; says which are next to it.

    Example:
        >>> from samestep.network.topologies.topology import LinkTypes
        >>> print(SlimFly(LinkTypes(Link(1e-6, 25e9)), q=5))
        Slim Fly q=5 p=4: 200 hosts, 50 switches, 750 directed links
    """

    q: int
    p: int = 0

    def __post_init__(self) -> None:
        whole(3, MOST)(self.q, "q of a Slim Fly")
        whole(0)(self.p, "p, the hosts on a Slim Fly's switch,")
        if not prime_power(self.q):
            near = nearest_prime_powers(self.q, least=3)
            raise UsageError(f"there is no Slim Fly of q = {self.q}: give a prime power, such as {near}")

    @property
    def delta(self) -> int:
        """d: -1, 0 or 1."""
        return (self.q + 1) % 4 - 1

    @property
    def degree(self) -> int:
        """Links of a switch to other switches, one way."""
        return (3 * self.q - self.delta) // 2

    @cached_property
    def size(self) -> Size:
        """The routers are the switches of both halves; the diameter is that of every MMS graph."""
        p, routers = self.p or -(-self.degree // 2), 2 * self.q * self.q
        return Size(f"Slim Fly q={self.q} p={p}", routers * p, routers, p, 2)

    @cached_property
    def field(self) -> Field:
        return field(self.q)

    @cached_property
    def generators(self) -> tuple[Ints, Ints]:
        """X and X'."""
        q, w = self.q, (self.q - self.delta) // 4
        exponents = np.arange(0, q - 1, 2)
        if self.delta == -1:
            exponents = np.append(np.arange(0, 2 * w, 2), np.arange(2 * w - 1, 4 * w - 2, 2))
        return self.field.powers[exponents], self.field.powers[(exponents + 1) % (q - 1)]

    def link_counts(self) -> tuple[tuple[int, Link], ...]:
        """Returns that all are alike; numbered by the switch that they leave, those within its column first."""
        return ((self.routers * self.degree, self.link_types.router),)

    def link_ends(self, number: int) -> tuple[int, int]:
        router, port = divmod(number, self.degree)
        return router, self.adjacent(router)[port]

    def adjacent(self, router: int) -> list[int]:
        """Returns the switches of its column, then those of the other half."""
        q, gf = self.q, self.field
        column, here = divmod(router, q)
        half, a = divmod(column, q)
        inside = column * q + gf.add[here, self.generators[half]]
        other = np.arange(q)
        # (1, a, here) is next to all (0, other, a other + here), and (0, a, here) to all (1, other, here - other a)
        line = gf.add[gf.mul[a], here] if half else q * q + gf.sub[here, gf.mul[a]]
        found: list[int] = [*inside.tolist(), *(other * q + line).tolist()]
        return found

    def hops(self, segments: Segments, *, split: bool) -> Iterator[Hop]:
        """Yields the hops: none, one, or two by [1], [2] or [3]."""
        straight = self._link(segments.begins, segments.ends)
        (near,) = np.nonzero(straight >= 0)
        yield Hop(near, straight[near], np.ones(len(near)))
        (far,) = np.nonzero((straight < 0) & (segments.begins != segments.ends))
        begins, ends = segments.begins[far], segments.ends[far]
        middles, counts = self._middles(begins, ends)
        if split:
            row, column = np.nonzero(np.arange(middles.shape[1]) < counts[:, None])
        else:
            row, column = np.arange(len(far)), segments.path_hash[far] % np.maximum(counts, 1)
        middle, shares = middles[row, column], 1 / counts[row] if split else np.ones(len(row))
        yield Hop(far[row], self._link(begins[row], middle), shares)
        yield Hop(far[row], self._link(middle, ends[row]), shares)

    @cached_property
    def _ports(self) -> Ints:
        """By half and difference of two switches of a column, the port of the link between them; -1 without one."""
        ports = np.full((2, self.q), -1)
        for half, steps in enumerate(self.generators):
            ports[half, steps] = np.arange(len(steps))
        return ports

    @cached_property
    def _in_column(self) -> tuple[Ints, Ints]:
        """[2]: by half and difference d, all a with a and d - a in X, and how many; none where d is in X."""
        ways, counts = [], []
        for steps, ports in zip(self.generators, self._ports, strict=True):
            pairs = ports[self.field.sub[:, steps]] >= 0
            pairs[0] = pairs[steps] = False
            counts.append(pairs.sum(axis=1))
            ways.append(steps[np.argsort(~pairs, axis=1, kind="stable")])
        widest = max(2, *(int(each.max()) for each in counts))
        return np.stack(ways)[:, :, :widest], np.stack(counts)

    def _link(self, begins: Ints, ends: Ints) -> Ints:
        """The number of the link between two switches, or -1 where there is none."""
        q = self.q
        column, other = begins // q, ends // q
        inside = self._ports[column // q, self.field.sub[ends % q, begins % q]]
        crossing = np.where(self._offset(begins, ends) == 0, len(self.generators[0]) + other % q, -1)
        port = np.where(column == other, inside, np.where(column // q == other // q, -1, crossing))
        return np.where(port < 0, -1, begins * self.degree + port)

    def _offset(self, one: Ints, other: Ints) -> Ints:
        """Of (0, a, b) and (1, m, c), whichever is `one`: b - (m a + c), 0 where they are neighbours."""
        q, gf = self.q, self.field
        low, high = np.minimum(one, other), np.maximum(one, other)
        line = gf.add[gf.mul[high // q % q, low // q % q], high % q]
        offset: Ints = gf.sub[low % q, line]
        return offset

    def _middles(self, begins: Ints, ends: Ints) -> tuple[Ints, Ints]:
        """The switches between two that are two hops apart, a row for each pair, and how many there are."""
        q, gf = self.q, self.field
        ways, in_column = self._in_column
        column, other = begins // q, ends // q
        inside = column == other
        across = column // q != other // q
        difference = gf.sub[ends % q, begins % q]
        middles = column[:, None] * q + gf.add[(begins % q)[:, None], ways[column // q, difference]]  # [2]
        counts = np.where(inside, in_column[column // q, difference], 1)
        middles[:, 0] = np.where(inside | across, middles[:, 0], self._crossing(begins, ends))
        offset = self._offset(begins, ends)
        in_first, in_second = self._ports[0, offset] >= 0, self._ports[1, offset] >= 0
        low, high = np.minimum(begins, ends), np.maximum(begins, ends)
        by_first = low // q * q + gf.sub[low % q, offset]  # [3] the switch of the first's column next to `high`
        by_second = high // q * q + gf.add[high % q, offset]
        middles[:, 0] = np.where(across, np.where(in_first, by_first, by_second), middles[:, 0])
        middles[:, 1] = np.where(across, by_second, middles[:, 1])
        return middles, np.where(across, in_first.astype(int) + in_second, counts)

    def _crossing(self, one: Ints, other: Ints) -> Ints:
        """[1]: the line through (a, b) and (a', b'), m = (b - b') / (a - a'), or where two lines meet."""
        q, gf = self.q, self.field
        half, x, y = one // (q * q), one // q % q, one % q
        slope = gf.mul[gf.sub[y, other % q], gf.inverse[gf.sub[x, other // q % q]]]
        m_or_a = np.where(half == 0, slope, gf.neg[slope])
        product = gf.mul[m_or_a, x]
        router: Ints = ((1 - half) * q + m_or_a) * q + np.where(half == 0, gf.sub[y, product], gf.add[product, y])
        return router
