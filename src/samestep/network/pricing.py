"""The price of a collective, at one switch or on a network whose links its messages share.

    round k of one rank     ├─ adding what it must send on ─┤├── the slower of its sending and its receiving ──┤
                                                             ├─ adding what nobody waits for ─┤
    round k                 lasts as long as that of its slowest rank

A rank has one port (or `ports`): its messages leave one after another, alpha + beta n each, while others come in at
the same time (full duplex). What the ranks of a host send to other hosts shares its NICs, and so does what they
receive. A rank that sends to several hosts and hears from several in one round has `links.crowded` of the bandwidth
between hosts. What a rank received and adds is added while the next round travels, unless that round sends it on or
replaces it: this is how :mod:`samestep.collectives.engine` does it, and what segments are for.

On a network of switches a round lasts at least as long as the messages need through it:

    the latency of the message that takes longest + max over links of bytes / bandwidth

No link can carry its bytes in less time, so the second term is never too long. It is exact where the busiest link is
busy all the while; where its messages are held up elsewhere, sharing links fairly wastes some of it. The sum is too
long where the message of most hops does not pass the busiest link. SimGrid, whose max-min flows follow every message
in time, agrees within 1 % on ranks in order, and on ranks at random but for some rounds of a torus
(docs/topologies.md). Assumed: a round begins when the one before has ended everywhere; routes are fixed; buffers never
overflow.

All of this is linear in the bytes of the buffer, so a round is the upper envelope of a few lines (latency, seconds a
byte), computed once: then the price of any number of bytes is a sum over some terms.

Bytes are cut into equal blocks, a fraction of a byte where they do not divide. On real elements a block is longer by
less than one element, so a plan costs at most rounds x element size x beta more than its price. What a rank adds in a
round counts as one span of blocks; every algorithm here has one.

An all-to-all of more than 4 million messages is known on a network by samples: as many shifts as have so many
messages, 32 at least, spread over all distances, stand for the others (how good they are: docs/topologies.md).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from samestep.errors import UsageError
from samestep.network.links import Links
from samestep.network.messages import AllToAll, Bools, Floats, Ints, MessageRound, Messages, Rounds
from samestep.network.placement import Placement
from samestep.network.routing import MINIMAL, Routing, link_loads
from samestep.network.topologies.topology import Topology
from samestep.text import seconds_text

T = TypeVar("T")

_MOST = 4_000_000  # messages of an all-to-all that are counted: in a second or two
_FEWEST = 32  # shifts of it, however many messages
_HELD = 500_000  # messages of it at once, a few arrays of that length


@dataclass(frozen=True)
class Price:
    latency_s: float = 0  # alpha of the messages
    transfer_s: float = 0  # beta of their bytes
    adding_s: float = 0  # gamma of what is added while nothing travels

    @property
    def seconds(self) -> float:
        return self.latency_s + self.transfer_s + self.adding_s

    def __add__(self, other: Price) -> Price:
        return Price(
            self.latency_s + other.latency_s, self.transfer_s + other.transfer_s, self.adding_s + other.adding_s
        )


class Line(NamedTuple):
    """Seconds of one rank's round, for n bytes of the buffer."""

    latency_s: float  # of no bytes
    transfer: float  # seconds for each byte
    adding: float  # seconds for each byte, before the round

    def price(self, nbytes: float) -> Price:
        return Price(self.latency_s, nbytes * self.transfer, nbytes * self.adding)


class Term(NamedTuple):
    lines: tuple[Line, ...]  # of which it lasts as long as the highest
    hidden: float  # seconds for each byte that are added meanwhile

    def seconds(self, nbytes: float) -> float:
        travels = max((line.latency_s + nbytes * (line.transfer + line.adding) for line in self.lines), default=0.0)
        return max(travels, nbytes * self.hidden)

    def price(self, nbytes: float) -> Price:
        prices = (line.price(nbytes) for line in self.lines)
        longest = max(prices, key=lambda one: one.seconds, default=Price())
        return longest + Price(adding_s=max(0.0, nbytes * self.hidden - longest.seconds))


@dataclass(frozen=True)
class CollectivePrice:
    """The price of one collective, for any number of bytes."""

    terms: Mapping[Term, int]  # its rounds, and how often each comes
    rounds: int  # how many there are

    def seconds(self, nbytes: float) -> float:
        return sum(times * term.seconds(nbytes) for term, times in self.terms.items())

    def price(self, nbytes: float) -> Price:
        found = [(times, term.price(nbytes)) for term, times in self.terms.items()]
        return Price(
            sum(times * one.latency_s for times, one in found),
            sum(times * one.transfer_s for times, one in found),
            sum(times * one.adding_s for times, one in found),
        )


def price(plan: Rounds, nbytes: float, links: Links) -> Price:
    """Returns what a plan costs for a buffer of so many bytes where all ranks stand at one switch.

    Example:
        >>> from samestep.collectives import ring
        >>> from samestep.network.links import Link
        >>> found = price(ring.all_reduce(4), 8e6, Links(Link(20e-6, 1e9), adding_bytes_per_s=4e9))
        >>> [seconds_text(one) for one in (found.latency_s, found.transfer_s, found.adding_s)]
        ['120 µs', '12 ms', '1.5 ms']
    """
    return price_lines(plan, links).price(nbytes)


def price_lines(plan: Rounds, links: Links, network: PlacedNetwork | None = None) -> CollectivePrice:
    """Returns what a plan costs for any number of bytes, on a network or, if None, at one switch for all hosts."""
    ports, gamma = _Ports(plan, links, network), 1 / (links.adding_bytes_per_s * plan.blocks)
    terms: dict[Term, int] = defaultdict(int)
    before: _Added | None = None
    rounds = 0
    for one in plan.make_rounds():
        lines = ports.lines(one)
        crossing = None if network is None else network.through(one)
        through = None if crossing is None else (crossing.latency_s, crossing.transfer / plan.blocks)
        for repetition, times in ((0, 1), (1, one.repeat - 1)):
            if times:
                late = None if before is None else before.must_add_first(one, repetition)
                terms[_term(lines, through, before, late, gamma)] += times
                before = _Added.by(one, repetition, plan.ranks)
        if one.repeat > 2:
            before = _Added.by(one, one.repeat - 1, plan.ranks)
        rounds += one.repeat
    if before is not None:
        terms[Term((), gamma * float(before.blocks.max()))] += 1
    return CollectivePrice(terms, rounds)


class _Lines(NamedTuple):
    """A line for each of some ranks: seconds are latency + n slope."""

    ranks: Ints
    latency: Floats
    slope: Floats


def _term(
    lines: _Lines, through: tuple[float, float] | None, before: _Added | None, late: Bools | None, gamma: float
) -> Term:
    adding, hidden, latest = np.zeros(len(lines.ranks)), 0.0, 0.0
    if before is not None and late is not None:
        behind = np.where(late, gamma * before.blocks, 0.0)
        adding, hidden, latest = behind[lines.ranks], gamma * float(before.blocks.max()), float(behind.max())
    latency, transfer = lines.latency, lines.slope
    if through is not None:
        latency, transfer, adding = (
            np.append(array, one) for array, one in zip((latency, transfer, adding), (*through, latest), strict=True)
        )
    return Term(upper_envelope(latency, transfer, adding), hidden)


def upper_envelope(latency: Floats, transfer: Floats, adding: Floats) -> tuple[Line, ...]:
    """Returns the lines of which no other is above for every number of bytes, the steepest first.

    >>> upper_envelope(np.array([1.0, 3.0, 2.0, 0.5]), np.array([2.0, 1.0, 1.0, 2.0]), np.zeros(4))
    (Line(latency_s=1.0, transfer=2.0, adding=0.0), Line(latency_s=3.0, transfer=1.0, adding=0.0))
    """
    if not len(latency):
        return ()
    slope = transfer + adding
    steepest = np.nonzero(slope == slope.max())[0]
    best = steepest[[latency[steepest].argmax()]]
    if latency[best[0]] < latency.max():
        order = np.lexsort((-latency, -slope))
        so_far = np.maximum.accumulate(latency[order])[:-1]
        best = order[np.append(True, latency[order][1:] > so_far)]
    return tuple(Line(*map(float, line)) for line in zip(latency[best], transfer[best], adding[best], strict=True))


@dataclass(frozen=True)
class _Added:
    """What each rank has yet to add of what it received: how many blocks, and between which."""

    blocks: Floats
    low: Ints
    high: Ints

    @classmethod
    def by(cls, one: Messages, repetition: int, ranks: int) -> _Added | None:
        """What it will be after a round."""
        if isinstance(one, AllToAll):
            if not one.adds:
                return None
            first = one.offset[:, None] + np.arange(one.group) * one.scale
            blocks, low, high = np.zeros(ranks), np.zeros(ranks, dtype=np.int64), np.zeros(ranks, dtype=np.int64)
            blocks[one.members] = (one.group - 1) * one.scale
            low[one.members], high[one.members] = first, first + one.scale
            return cls(blocks, low, high)
        if not one.adds.any():
            return None
        begin, targets, width = one.begin(repetition)[one.adds], one.targets[one.adds], one.width[one.adds]
        low, high = np.full(ranks, np.iinfo(np.int64).max), np.zeros(ranks, dtype=np.int64)
        np.minimum.at(low, targets, begin)
        np.maximum.at(high, targets, begin + width)
        return cls(np.bincount(targets, width, ranks).astype(float), low, high)

    def must_add_first(self, one: Messages, repetition: int) -> Bools:
        """The ranks that must have added before a round: they send a block on, or have it replaced."""
        late = np.zeros(len(self.blocks), dtype=bool)
        if isinstance(one, AllToAll):  # all blocks of the group are sent on by their rank, or replaced on it
            late[one.members] = self.blocks[one.members] > 0
            return late
        begin = one.begin(repetition)
        for ends, touching in ((one.sources, True), (one.targets, ~one.adds)):
            overlap = (begin < self.high[ends]) & (self.low[ends] < begin + one.width)
            late[ends[overlap & touching]] = True
        return late


class _Recent(Generic[T]):
    """What was computed of the last few rounds: two of a double tree come in turn, over and over."""

    def __init__(self, compute: Callable[[Messages], T]) -> None:
        self._compute = compute
        self._held: deque[tuple[Messages, T]] = deque(maxlen=4)  # holds the arrays too, so that no other is the same

    def __call__(self, one: Messages) -> T:
        for other, found in self._held:
            if _same_messages(one, other):
                return found
        found = self._compute(one)
        self._held.append((one, found))
        return found


def _same_messages(one: Messages, other: Messages) -> bool:
    if isinstance(one, AllToAll):
        return isinstance(other, AllToAll) and one.members is other.members and one.scale == other.scale
    return isinstance(other, MessageRound) and one.has_ranks_of(other) and np.array_equal(one.width, other.width)


class _Ports:
    """How long each rank sends and receives in a round, and waits for its host's NICs to do so."""

    def __init__(self, plan: Rounds, links: Links, network: PlacedNetwork | None) -> None:
        self._ranks = plan.ranks
        self._block = 1 / plan.blocks
        self._links = links
        self._placed = network is not None  # the NICs are links of the network
        self._hosts: Ints = np.arange(plan.ranks) // (links.local or plan.ranks)
        if network is not None:
            self._hosts = network.placement.array
        self.lines = _Recent(self._lines)

    def _lines(self, one: Messages) -> _Lines:
        if isinstance(one, AllToAll) and self._links.ports == 1 and self._placed:
            return self._of_all_to_all(one)
        several = list(self._of_messages(one.expanded() if isinstance(one, AllToAll) else one))
        return _Lines(*map(np.concatenate, zip(*several, strict=True)))

    def _of_messages(self, one: MessageRound) -> Iterator[_Lines]:
        links, hosts, everyone = self._links, self._hosts, np.arange(self._ranks)
        crossing = hosts[one.sources] != hosts[one.targets]
        far = crossing if self._placed or links.between is not None else np.ones(len(crossing), dtype=bool)
        latency = np.where(far, links.across().latency_s, links.inside.latency_s)
        alone = self._block * one.width / np.where(far, links.across().bytes_per_s, links.inside.bytes_per_s)
        crowded = np.ones(self._ranks)
        if links.crowded < 1:
            sent, heard = (np.bincount(ends[far], minlength=self._ranks) for ends in (one.sources, one.targets))
            crowded[(sent > 1) & (heard > 1)] = links.crowded
        for ends in (one.sources, one.targets):
            slope = alone / np.where(far, crowded[ends], 1.0)
            # one message after another, over all ports
            yield _Lines(
                everyone,
                np.bincount(ends, latency, self._ranks) / links.ports,
                np.bincount(ends, slope, self._ranks) / links.ports,
            )
            if links.ports > 1:  # no message is cut
                yield _Lines(ends, latency, slope)
            if crossing.any() and not self._placed:
                # ranks prepare their messages side by side, so one latency; the bytes share the NICs
                carried = np.bincount(hosts[ends[crossing]], alone[crossing], int(hosts.max()) + 1) / links.nics
                mine = np.unique(ends[crossing])
                once = np.full(len(mine), float(links.across().latency_s))
                yield _Lines(mine, once, carried[hosts[mine]] / crowded[mine])

    def _of_all_to_all(self, one: AllToAll) -> _Lines:
        """Each rank exchanges with all members of its group but itself, some of them on its host."""
        links, members = self._links, one.members
        groups = np.arange(len(members))[:, None] + self._hosts[members] * len(members)
        _, places, counts = np.unique(groups, return_inverse=True, return_counts=True)
        near = counts[places].reshape(-1) - 1.0
        far = one.group - 1 - near
        across, inside = links.across(), links.inside
        width = one.scale * self._block
        slope = near / inside.bytes_per_s + far / across.bytes_per_s / np.where(far > 1, links.crowded, 1.0)
        return _Lines(members.ravel(), near * inside.latency_s + far * across.latency_s, width * slope)


class Crossing(NamedTuple):
    """A round through the network, or inside the hosts, where a block is one byte."""

    latency_s: float = 0  # of the message that takes longest
    transfer: float = 0.0  # seconds of the busiest link
    alone: float = 0.0  # seconds of the largest message if nothing else were in the network
    busiest: int | None = None  # that link; None where nothing crosses, or where it is inside a host


class PlacedNetwork:
    """Ranks placed on the hosts of a network."""

    def __init__(self, topology: Topology, placement: Placement, routing: Routing = MINIMAL) -> None:
        self.topology = topology
        self.placement = placement
        self.routing = routing
        self.through = _Recent(self._through)
        self._inside = _Recent(self._inside_hosts)

    def price(self, rounds: Iterable[Messages], block: float) -> ContendedPrice:
        """Returns what rounds cost with blocks of so many bytes."""
        latency = transfer = alone = 0.0
        number = 0
        waits: dict[int | None, float] = defaultdict(float)
        for one in rounds:
            parts = self.through(one), self._inside(one)
            longest = max(parts, key=lambda part: part.latency_s + part.transfer * block)
            number += one.repeat
            latency += one.repeat * longest.latency_s
            transfer += one.repeat * block * longest.transfer
            alone += one.repeat * block * longest.alone
            waits[longest.busiest] += one.repeat * block * longest.transfer
        busiest = max(waits, key=lambda link: waits[link], default=None)
        ends = self.topology.ends(busiest) if busiest is not None else None
        return ContendedPrice(Price(latency, transfer), alone, number, ends)

    def _through(self, one: Messages) -> Crossing:
        loads, latency = np.zeros(self.topology.links), 0.0
        largest = 0.0
        for sources, targets, width, scale in _batches(one):
            begins, ends = self._host_of(sources), self._host_of(targets)
            across = begins != ends
            if across.any():
                some, latencies = link_loads(self.topology, self.routing, begins[across], ends[across], width[across])
                loads += scale * some
                latency, largest = max(latency, float(latencies.max())), max(largest, float(width[across].max()))
        if not loads.any():
            return Crossing(latency)
        seconds = loads / self.topology.bandwidths
        busiest = int(np.argmax(seconds))
        alone = largest / self.topology.link_types.port.bytes_per_s
        return Crossing(latency, float(seconds[busiest]), alone, busiest)

    def _inside_hosts(self, one: Messages) -> Crossing:
        blocks, largest = np.zeros((2, self.placement.ranks)), 0.0
        for sources, targets, width, scale in _batches(one):
            inside = self._host_of(sources) == self._host_of(targets)
            if inside.any():
                largest = max(largest, float(width[inside].max()))
                for way, ranks in enumerate((sources, targets)):
                    blocks[way] += scale * np.bincount(ranks[inside], width[inside], self.placement.ranks)
        if not largest:
            return Crossing()
        link = self.topology.link_types.inside
        return Crossing(link.latency_s, float(blocks.max()) / link.bytes_per_s, largest / link.bytes_per_s)

    def _host_of(self, ranks: Ints) -> Ints:
        if len(ranks) and not 0 <= ranks.min() <= ranks.max() < self.placement.ranks:
            raise UsageError(
                f"a message of rank {ranks.max() if ranks.min() >= 0 else ranks.min()}, but only "
                f"{self.placement.ranks} ranks are placed: place as many as the rounds have"
            )
        return self.placement.array[ranks]


@dataclass(frozen=True)
class ContendedPrice:
    """What rounds cost on a network, where messages get in each other's way."""

    price: Price  # latency and transfer
    alone_s: float  # what the transfer would be if the largest message of each round were alone in the network
    rounds: int  # how many there are
    # the vertices at the ends of the link that rounds wait for longest; None where it is not one link
    busiest: tuple[int, int] | None

    @property
    def seconds(self) -> float:
        return self.price.seconds

    @property
    def contention(self) -> float:
        """How many times longer the transfer takes than alone; less than 1 where messages are split."""
        return self.price.transfer_s / self.alone_s if self.alone_s else 1.0

    def __str__(self) -> str:
        price = self.price
        times = f"latency {seconds_text(price.latency_s)}, transfer {seconds_text(price.transfer_s)}"
        rounds = "1 round" if self.rounds == 1 else f"{self.rounds} rounds"
        return f"{seconds_text(self.seconds)} in {rounds}: {times}, {self.contention:.2f} times that alone"


def contended_price(
    plan: Rounds, nbytes: float, topology: Topology, placement: Placement, routing: Routing = MINIMAL
) -> ContendedPrice:
    """Returns what a plan's messages cost on a network for a buffer of so many bytes, with ranks placed on its hosts.

    Without adding, which takes place on the hosts.

    Raises:
        UsageError: a message of a rank that is not placed.

    Example:
        >>> from samestep.collectives import ring
        >>> from samestep.network.links import Link
        >>> from samestep.network.placement import circuit, linear
        >>> from samestep.network.topologies.slim_fly import SlimFly
        >>> from samestep.network.topologies.topology import LinkTypes
        >>> network = SlimFly(LinkTypes(Link(1e-6, 25e9)), q=5)
        >>> print(contended_price(ring.all_reduce(200), 100e6, network, linear(network, 200)))
        17.5 ms in 398 rounds: latency 1.59 ms, transfer 15.9 ms, 2.00 times that alone
        >>> print(contended_price(ring.all_reduce(200), 100e6, network, circuit(network, 200)))
        9.15 ms in 398 rounds: latency 1.19 ms, transfer 7.96 ms, 1.00 times that alone
    """
    return PlacedNetwork(topology, placement, routing).price(plan.make_rounds(), nbytes / plan.blocks)


def _batches(one: Messages) -> Iterator[tuple[Ints, Ints, Floats, float]]:
    """Yields sources, targets and widths of a round, and how many messages each stands for."""
    if isinstance(one, MessageRound):
        yield one.sources, one.targets, one.width.astype(float), 1.0
        return
    ranks, shifts = one.members.size, one.group - 1
    most = max(_FEWEST, _MOST // ranks)
    some = list(range(1, shifts + 1))
    if shifts > most:  # spread evenly and in step with no dimension: by the golden section
        some = sorted({1 + int(number * 0.6180339887498949 % 1 * shifts) for number in range(most)})
    step = max(1, _HELD // ranks)
    for first in range(0, len(some), step):
        sources, targets = one.shifts(some[first : first + step])
        yield sources, targets, np.full(len(sources), float(one.scale)), shifts / len(some)
