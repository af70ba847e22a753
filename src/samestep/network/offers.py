"""What a cluster's all-reduces cost: each counted once for so many ranks, and then known for any number of bytes.

    seconds(n) = sum over rounds of   the highest of its lines, latency + n x seconds a byte
                                    + adding, n x gamma, behind it; or what of that the next round does not hide

    algorithm                       cut into
    ring
    segmented ring of 2             2 segments: the second hides the adding, more would only shorten the first
    halving and doubling
    recursive doubling
    binomial tree
    double tree                     1, 2, 4, ... 64 chunks a tree: the best of them for n
    1 server; a server a rank
    torus r x c                     the most nearly square grid
    hierarchical N x g              with a ring, halving and doubling, or recursive doubling between hosts

These are the plans that :mod:`samestep.collectives.choose` prices one by one for one number of bytes, on one switch;
there the two agree to rounding; but for a double tree over hosts of several ranks: whoever adds need not be the one
with the slowest port, and it is up to 5 % quicker than is said here. A server on every rank is an exchange of p (p - 1)
messages, which beyond 2,000 ranks is known by samples, and too long (:mod:`samestep.network.contention`). Tori in
several directions are left out: a cluster's file does not say how many ports a rank has.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

from samestep.network import double_tree, rounds
from samestep.network.cluster import Cluster
from samestep.network.ports import Busy, Line, Ports
from samestep.network.rounds import Rule, Some

__all__: list[str] = []

DOUBLE_TREE = "double tree"
CHUNKS = (1, 2, 4, 8, 16, 32, 64)  # near the best number seconds are flat: half or twice of it costs a few per cent


@dataclass(frozen=True)
class Term:
    """Rounds that are alike, one after another.

    Attributes:
        lines: of which each round lasts as long as the highest.
        adding: seconds a byte of the buffer that are added behind each.
        hidden: while the next round travels.
        after: the lines of the round behind them.
        times: how many there are.
    """

    lines: tuple[Line, ...]
    adding: float
    hidden: bool
    after: tuple[Line, ...]
    times: int

    def seconds(self, nbytes: float) -> float:
        """Returns how long they take."""
        each, added = _longest(self.lines, nbytes), self.adding * nbytes
        if not self.hidden:
            return self.times * (each + added)
        late = max(0.0, added - each) * (self.times - 1) + max(0.0, added - _longest(self.after, nbytes))
        return self.times * each + late


@dataclass(frozen=True)
class Way:
    """An algorithm, its buffer cut into so many chunks.

    Attributes:
        chunks: 1 where it is not cut.
        terms: with how often each comes, in no order.
        alone: seconds a byte, as if nothing but the ranks' own ports were in the way.
    """

    chunks: int
    terms: tuple[tuple[Term, int], ...]
    alone: float

    def seconds(self, nbytes: float) -> float:
        """Returns how long an all-reduce of so many bytes takes."""
        return sum(times * term.seconds(nbytes) for term, times in self.terms)

    @cached_property
    def rounds(self) -> int:
        """How many there are."""
        return sum(term.times * times for term, times in self.terms)

    @cached_property
    def transfer(self) -> float:
        """Seconds a byte of many bytes, without adding."""
        return sum(times * term.times * term.lines[0].seconds_per_byte for term, times in self.terms if term.lines)


@dataclass(frozen=True)
class Offer:
    """An all-reduce that could be taken.

    Attributes:
        name: of the algorithm.
        ways: to cut it, one or more; none where it cannot be taken.
        unavailable: why it cannot; empty where it can.
    """

    name: str
    ways: tuple[Way, ...] = ()
    unavailable: str = ""

    def seconds(self, nbytes: float) -> float:
        """Returns how long so many bytes take, cut into the best chunks; endless where it cannot be taken."""
        return min((way.seconds(nbytes) for way in self.ways), default=math.inf)

    def way(self, nbytes: float) -> Way:
        """Returns the best way to cut so many bytes, the least cut of those that are equal."""
        return min(self.ways, key=lambda way: way.seconds(nbytes))

    @cached_property
    def latency_s(self) -> float:
        """Seconds of no bytes."""
        return self.seconds(0.0)

    @cached_property
    def seconds_per_byte(self) -> float:
        """Of as many bytes as are cut best into the most chunks, adding included."""
        return min((way.seconds(_MANY) - way.seconds(0.0) for way in self.ways), default=math.inf) / _MANY

    @property
    def rounds(self) -> int:
        """How many there are, where many bytes are cut best."""
        return self.way(_MANY).rounds if self.ways else 0

    @property
    def contention(self) -> float:
        """How many times longer many bytes take than if nothing but the ranks' own ports were in their way."""
        way = self.way(_MANY) if self.ways else None
        return way.transfer / way.alone if way is not None and way.alone else 1.0


_MANY = 1e15  # bytes: what takes a fixed time does not show


def offers(cluster: Cluster, ranks: int, stages: int = 1, *, quickly: bool = False) -> tuple[Offer, ...]:
    r"""Returns every all-reduce over the ranks of a cluster, those that cannot be taken with the reason.

    Args:
        cluster: with its links, network, placement and routing.
        ranks: in each all-reduce.
        stages: all-reduces that take place at once, each among every so-manyth rank: those of a pipeline's stages.
        quickly: leave out what takes longest to count, double trees and a server on every rank.

    Raises:
        UsageError: more ranks than the cluster has.

    Example:
        >>> from samestep.network.cluster import parse
        >>> one = parse('nodes.count = 8\nlinks.between = { latency = "20 us", bandwidth = "1 GB/s" }')
        >>> found = offers(one, 8)
        >>> [(best(found, nbytes).name, round(best(found, nbytes).seconds(nbytes), 6)) for nbytes in (1e3, 1e8)]
        [('recursive doubling', 6.3e-05), ('halving and doubling', 0.17512)]
    """
    ports = Ports(cluster, ranks * stages)
    gamma = 1 / cluster.links.adding_bytes_per_s
    return tuple(
        Offer(name, unavailable=rules)
        if isinstance(rules, str)
        else Offer(name, tuple(_way(ports, gamma, chunks, rule(ranks, 1.0), stages) for chunks, rule in rules.items()))
        for name, rules in _rules(cluster, ranks, stages)
        if not (quickly and name in (DOUBLE_TREE, f"{ranks} servers"))
    )


def best(found: Iterable[Offer], nbytes: float) -> Offer:
    """Returns the quickest offer for so many bytes; of those that are equal but for rounding, the first."""
    return min(found, key=lambda offer: float(f"{offer.seconds(nbytes):.9g}"))


class _Counted(NamedTuple):
    """What is kept of a round once it is counted, so that its messages need not be."""

    busy: Busy
    adds: float
    hidden: bool
    times: int


def _way(ports: Ports, gamma: float, chunks: int, each: Iterable[Some], stages: int) -> Way:
    if stages > 1:
        each = rounds.apart(each, stages)
    counted = [_Counted(ports.busy(one), one.adds, one.hidden, one.times) for one in each if one.times]
    terms: dict[Term, int] = {}
    for number, (busy, adds, hidden, times) in enumerate(counted):
        after = counted[number + 1].busy.lines if hidden and number + 1 < len(counted) else ()
        term = Term(busy.lines, adds * gamma, hidden, after, times)
        terms[term] = terms.get(term, 0) + 1
    return Way(chunks, tuple(terms.items()), sum(one.times * one.busy.alone for one in counted))


def _rules(cluster: Cluster, ranks: int, stages: int) -> Iterator[tuple[str, dict[int, Rule] | str]]:
    """Names, and the rounds by how often they are cut, or why there are none."""
    yield "recursive doubling", {1: rounds.recursive_doubling}
    yield "halving and doubling", {1: rounds.halving_doubling}
    yield "binomial tree", {1: rounds.binomial_tree}
    yield "1 server", {1: rounds.parameter_server}
    yield "ring", {1: rounds.ring}
    yield "segmented ring of 2", {2: rounds.segmented_ring}
    yield DOUBLE_TREE, {chunks: partial(double_tree.all_reduce, chunks=chunks) for chunks in CHUNKS}
    yield (
        f"{ranks} servers",
        {1: rounds.every_server} if ranks > 1 else "one rank needs no servers",
    )
    yield _torus(ranks)
    yield from _hierarchical(cluster, ranks, stages)


def _torus(ranks: int) -> tuple[str, dict[int, Rule] | str]:
    rows = next(rows for rows in range(math.isqrt(ranks), 0, -1) if ranks % rows == 0)
    if rows == 1:
        return "torus", f"{ranks} ranks make no grid: it needs a number with divisors"
    return f"torus {rows}x{ranks // rows}", {1: lambda ranks, nbytes: rounds.torus(rows, ranks // rows, nbytes)}


def _hierarchical(cluster: Cluster, ranks: int, stages: int) -> Iterator[tuple[str, dict[int, Rule] | str]]:
    local = cluster.devices // stages
    across: dict[str, Rule] = {
        "ring": rounds.ring,
        "halving and doubling": rounds.halving_doubling,
        "recursive doubling": rounds.recursive_doubling,
    }
    for name, rule in across.items():
        why = _uneven(cluster, ranks, stages)
        each: dict[int, Rule] = {1: partial(_levels, local=local, across=rule)}
        if why:
            yield f"hierarchical ({name})", why
        else:
            yield f"hierarchical {ranks // local}x{local} ({name})", each


def _levels(ranks: int, nbytes: float, local: int, across: Rule) -> Iterator[Some]:
    return rounds.hierarchical(ranks, local, nbytes, across)


def _uneven(cluster: Cluster, ranks: int, stages: int) -> str:
    """Why ranks have no two levels, if they have none."""
    local, rest = divmod(cluster.devices, stages)
    if rest:
        return f"{cluster.devices} devices of a host cannot be shared evenly among {stages} stages"
    if local == 1:
        return "each host has one rank of the sum"
    if ranks <= local:
        return f"all {ranks} ranks are on one host"
    return f"{ranks} ranks are not {local} on each host" if ranks % local else ""


def _longest(lines: tuple[Line, ...], nbytes: float) -> float:
    return max((line.seconds(nbytes) for line in lines), default=0.0)
