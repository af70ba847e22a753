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

Assumed: a round begins when the one before has ended everywhere; routes are fixed; buffers never overflow.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from samestep.errors import UsageError
from samestep.network.cost import Price
from samestep.network.links import seconds_text
from samestep.network.load import Load, load
from samestep.network.placement import Placement
from samestep.network.rounds import Messages, Round, Shift, of_messages
from samestep.network.routing import MINIMAL, Routing
from samestep.network.topologies.topology import Topology

if TYPE_CHECKING:
    from samestep.network.topologies.topology import Floats, Ints

__all__: list[str] = []


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


class _Part(NamedTuple):
    """A round's messages through the network, or inside hosts, where the largest message of the round is one byte."""

    latency_s: float
    transfer_s: float
    alone_s: float
    busiest: int | None

    def seconds(self, nbytes: float) -> float:
        return self.latency_s + self.transfer_s * nbytes


def price(
    rounds: Iterable[Round | Shift | Messages],
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
        >>> print(price(ring(200, 100e6), network, linear(network, 200)))
        17.5 ms in 398 rounds: latency 1.59 ms, transfer 15.9 ms, 2.00 times that alone
        >>> print(price(ring(200, 100e6), network, circuit(network, 200)))
        9.15 ms in 398 rounds: latency 1.19 ms, transfer 7.96 ms, 1.00 times that alone
    """
    counter = _Counter(topology, placement, routing)
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


class _Counter:
    """Counts rounds on a network, those that differ only in size once."""

    def __init__(self, topology: Topology, placement: Placement, routing: Routing) -> None:
        self.topology = topology
        self.placement = placement
        self.routing = routing
        self.counted: dict[bytes, list[_Part]] = {}

    def priced(self, one: Round | Shift | Messages) -> tuple[_Part, float, int]:
        """The part of a round that takes longest, the bytes of its largest message, and how often it comes."""
        if isinstance(one, Shift):
            turn = self._turn(one)
            if turn is not None:
                return turn, one.nbytes, one.times
            one = one.round()
        elif not isinstance(one, Round):
            one = of_messages(one)
        largest = float(one.nbytes.max(initial=0))
        parts = self._parts(one, one.nbytes / (largest or 1))
        part = max(parts, key=lambda each: each.seconds(largest), default=_Part(0, 0, 0, None))
        return part, largest, one.times

    def _turn(self, shift: Shift) -> _Part | None:
        """What the topology knows without counting."""
        topology, placement = self.topology, self.placement
        everyone = shift.ranks == placement.ranks == topology.hosts and placement.in_order
        if not everyone or topology.cables.local > 1 or self.routing != MINIMAL or shift.distance % shift.ranks == 0:
            return None
        turn = topology.turn(shift.distance)
        if turn is None:
            return None
        transfer = max(bytes_ / link.bytes_per_s for bytes_, link in turn.loads)
        return _Part(topology.cables.overhead_s + turn.latency_s, transfer, self._alone_s, None)

    @property
    def _alone_s(self) -> float:
        return 1 / self.topology.cables.port_link.bytes_per_s

    def _parts(self, one: Round, shares: Floats) -> list[_Part]:
        digest = hashlib.blake2b(digest_size=16)
        for array in (one.sources, one.targets, shares):
            digest.update(array.tobytes())
        key = digest.digest()
        if key not in self.counted:
            self.counted[key] = list(self._count(one, shares))
        return self.counted[key]

    def _count(self, one: Round, shares: Floats) -> Iterable[_Part]:
        """The network's part and the hosts' own."""
        for ranks in (one.sources, one.targets):
            if len(ranks) and not 0 <= ranks.min() <= ranks.max() < self.placement.ranks:
                raise UsageError(
                    f"a message of rank {ranks.max() if ranks.min() >= 0 else ranks.min()}, but only "
                    f"{self.placement.ranks} ranks are placed: place as many as the rounds have"
                )
        sources, targets = self.placement.array[one.sources], self.placement.array[one.targets]
        across = sources != targets
        if across.any():
            through = load(self.topology, self.routing, sources[across], targets[across], shares[across])
            yield self._network(through)
        if not across.all():
            yield self._inside(one.sources[~across], one.targets[~across], shares[~across])

    def _network(self, through: Load) -> _Part:
        return _Part(through.latency_s, through.transfer_s, self._alone_s, through.busiest)

    def _inside(self, sources: Ints, targets: Ints, shares: Floats) -> _Part:
        """A rank's messages to others on its host leave one after another, while others come in."""
        import numpy as np

        link = self.topology.cables.inside_link
        most = max(float(np.bincount(ranks, shares).max()) for ranks in (sources, targets))
        return _Part(link.latency_s, most / link.bytes_per_s, 1 / link.bytes_per_s, None)
