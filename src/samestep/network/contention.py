"""What rounds cost on a network, where messages get in each other's way.

    rounds ── placement ──▶ hosts ── routing ──▶ links ── most loaded ──▶ seconds

    100 MB over 256 ranks on a torus of 16 x 16      transfer, as if every message were alone
      a ring, ranks in order or along a circuit       1.0 times
      halving and doubling                            2.1 times
      a ring, ranks at random                         6.0 times

:mod:`samestep.network.cost` prices a plan as if all ranks stood at one switch; this is the same plan on a real one. Its
adding (gamma) is not in here: it takes place on the hosts, and costs what it costs there.

Rounds that differ only in their sizes are counted once: of halving and doubling, whose gathering mirrors its
scattering, half; of a ring, one. A :class:`samestep.network.rounds.Shift` over all hosts of a switch or torus in their
order is not counted at all: the topology knows (`turn`).

An :class:`samestep.network.rounds.Exchange` of more than 4 million messages is known by its shifts: as many as have so
many, 32 at least, spread over all distances, stand for the others. Chance puts several on one link, so the answer is
too long rather than too short: for 1,056 to 2,048 ranks and 32 shifts it was 1.0 (fat tree, in order) to 2.4 times the
whole (Slim Fly).

Assumed: a round begins when the one before has ended everywhere; routes are fixed; buffers never overflow.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from samestep.errors import UsageError
from samestep.network.cost import Price
from samestep.network.load import Load, load
from samestep.network.placement import Placement
from samestep.network.rounds import Exchange, Messages, Round, Shift, Some, of_messages
from samestep.network.routing import MINIMAL, Routing
from samestep.network.topologies.topology import Topology
from samestep.text import seconds_text

if TYPE_CHECKING:
    from samestep.network.topologies.topology import Floats, Ints

__all__: list[str] = []

_MOST = 4_000_000  # messages of an exchange that are counted: in a second or two
_FEWEST = 32  # shifts of it, however many messages
_HELD = 500_000  # messages of it at once, a few arrays of that length


@dataclass(frozen=True)
class Cost:
    """What rounds cost.

    Attributes:
        price: latency and transfer.
        alone_s: what the transfer would be if the largest message of each round were alone in the network.
        rounds: how many there are.
        busiest: the vertices at the ends of the link that rounds wait for longest; None where it is not one link.
    """

    price: Price
    alone_s: float
    rounds: int
    busiest: tuple[int, int] | None

    @property
    def seconds(self) -> float:
        """The whole."""
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


class Part(NamedTuple):
    """A round's messages through the network, or inside hosts, where the largest message of the round is one byte."""

    latency_s: float
    transfer_s: float
    alone_s: float
    busiest: int | None

    def seconds(self, nbytes: float) -> float:
        return self.latency_s + self.transfer_s * nbytes


def contended_price(
    rounds: Iterable[Some | Messages],
    topology: Topology,
    placement: Placement,
    routing: Routing = MINIMAL,
) -> Cost:
    """Returns what rounds of messages between ranks cost.

    Args:
        rounds: of arrays, by rule, or plain (source rank, target rank, bytes).
        topology: with what its links cost.
        placement: of the ranks on its hosts.
        routing: of the messages.

    Raises:
        UsageError: a message of a rank that is not placed.

    Example:
        >>> from samestep.network.links import Link
        >>> from samestep.network.placement import circuit, linear
        >>> from samestep.network.rounds import ring
        >>> from samestep.network.topologies.cables import Cables
        >>> from samestep.network.topologies.slim_fly import SlimFly
        >>> network = SlimFly(Cables(Link(1e-6, 25e9)), q=5)
        >>> print(contended_price(ring(200, 100e6), network, linear(network, 200)))
        17.5 ms in 398 rounds: latency 1.59 ms, transfer 15.9 ms, 2.00 times that alone
        >>> print(contended_price(ring(200, 100e6), network, circuit(network, 200)))
        9.15 ms in 398 rounds: latency 1.19 ms, transfer 7.96 ms, 1.00 times that alone
    """
    counter = Counter(topology, placement, routing)
    latency = transfer = alone = 0.0
    number = 0
    waits: dict[int | None, float] = defaultdict(float)
    for each in rounds:
        one, nbytes, times = counter.priced(each)
        number += times
        latency += times * one.latency_s
        transfer += times * nbytes * one.transfer_s
        alone += times * nbytes * one.alone_s
        waits[one.busiest] += times * nbytes * one.transfer_s
    longest = max(waits, key=lambda link: waits[link], default=None)
    busiest = topology.ends(longest) if longest is not None else None
    return Cost(Price(latency, transfer), alone, number, busiest)


class Counter:
    """Counts rounds on a network, those that differ only in size once."""

    def __init__(self, topology: Topology, placement: Placement, routing: Routing) -> None:
        self.topology = topology
        self.placement = placement
        self.routing = routing
        self.counted: dict[bytes, list[Part]] = {}

    def priced(self, one: Some | Messages) -> tuple[Part, float, int]:
        """The part of a round that takes longest, the bytes of its largest message, and how often it comes."""
        each = one if isinstance(one, Round | Shift | Exchange) else of_messages(one)
        parts, largest = self.parts(each)
        part = max(parts, key=lambda part: part.seconds(largest), default=Part(0, 0, 0, None))
        return part, largest, each.times

    def parts(self, one: Some) -> tuple[list[Part], float]:
        """Returns the parts of a round, through the network and inside hosts, and the bytes of its largest message."""
        if isinstance(one, Exchange):
            return self._exchange(one), one.nbytes
        if isinstance(one, Shift):
            turn = self._turn(one)
            if turn is not None:
                return [turn], one.nbytes
            one = one.round()
        largest = float(one.nbytes.max(initial=0))
        shares = one.nbytes / (largest or 1)
        digest = hashlib.blake2b(digest_size=16)
        for array in (one.sources, one.targets, shares):
            digest.update(array.tobytes())
        key = digest.digest()
        if key not in self.counted:
            self.counted[key] = list(self._count([(one, shares)]))
        return self.counted[key], largest

    def _exchange(self, one: Exchange) -> list[Part]:
        """All shifts, or as many as are counted in a second, which then stand for all."""
        key = f"{one.ranks} {one.stride}".encode()
        if key not in self.counted:
            some = _spread(one.shifts, max(_FEWEST, _MOST // one.ranks))
            step = max(1, _HELD // one.ranks)
            batches = (one.some(some[begin : begin + step]) for begin in range(0, len(some), step))
            scale = one.shifts / max(1, len(some))
            self.counted[key] = list(
                self._count((batch, batch.nbytes / (one.nbytes or 1) * scale) for batch in batches)
            )
        return self.counted[key]

    def _turn(self, shift: Shift) -> Part | None:
        """What the topology knows without counting."""
        topology, placement = self.topology, self.placement
        everyone = shift.ranks == placement.ranks == topology.hosts and placement.in_order
        if not everyone or topology.cables.local > 1 or self.routing != MINIMAL or shift.distance % shift.ranks == 0:
            return None
        turn = topology.turn(shift.distance)
        if turn is None:
            return None
        transfer = max(bytes_ / link.bytes_per_s for bytes_, link in turn.loads)
        return Part(topology.cables.overhead_s + turn.latency_s, transfer, self._alone_s, None)

    @property
    def _alone_s(self) -> float:
        return 1 / self.topology.cables.port_link.bytes_per_s

    def _count(self, several: Iterable[tuple[Round, Floats]]) -> Iterator[Part]:
        """The network's part and the hosts' own, of rounds that are one."""
        import numpy as np

        through: Load | None = None
        within = np.zeros((2, self.placement.ranks))
        for one, shares in several:
            sources, targets = (self.placement.array[self._checked(ranks)] for ranks in (one.sources, one.targets))
            across = sources != targets
            if across.any():
                mine = load(self.topology, self.routing, sources[across], targets[across], shares[across])
                through = mine if through is None else through.beside(mine)
            if not across.all():
                for way, ranks in enumerate((one.sources, one.targets)):
                    within[way] += np.bincount(ranks[~across], shares[~across], self.placement.ranks)
        if through is not None:
            yield self._network(through)
        if within.any():
            link = self.topology.cables.inside_link
            yield Part(link.latency_s, float(within.max()) / link.bytes_per_s, 1 / link.bytes_per_s, None)

    def _checked(self, ranks: Ints) -> Ints:
        if len(ranks) and not 0 <= ranks.min() <= ranks.max() < self.placement.ranks:
            raise UsageError(
                f"a message of rank {ranks.max() if ranks.min() >= 0 else ranks.min()}, but only "
                f"{self.placement.ranks} ranks are placed: place as many as the rounds have"
            )
        return ranks

    def _network(self, through: Load) -> Part:
        return Part(through.latency_s, through.transfer_s, self._alone_s, through.busiest)


def _spread(shifts: int, most: int) -> list[int]:
    """As many distances as may be counted, spread evenly and in step with no dimension: by the golden section."""
    if shifts <= most:
        return list(range(1, shifts + 1))
    return sorted({1 + int(number * 0.6180339887498949 % 1 * shifts) for number in range(most)})
