"""What every network can be asked: who its neighbours are, and which links lie on the way; by arithmetic alone.

    host 0 ─┐                                ┌─ host 4        vertices   hosts, then switches: 0, 1, 2, ...
    host 1 ─┼─ router 0 ───────── router 1 ──┼─ host 5        routers    that hosts stand at: the switches, or the
    host 2 ─┘                                └─ host 6                   hosts themselves where there are none

    directed links, numbered without a gap
      [1] 0 .. H-1      host to its router           none where
      [2] H .. 2H-1     router to its host           hosts are routers
      [3] 2H ..         router to router, kind by kind: the fabric

Nothing is stored for hosts or their pairs: a network of a billion hosts takes no more memory than one of 4. Counting
bytes takes a few numbers for each link and each message; the ways of all messages are computed together, in numpy
arrays, hop by hop.

Simulators keep routes in tables (SimGrid's Floyd zones, networkx's all-pairs paths), quadratic in the hosts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from samestep.errors import UsageError
from samestep.network.links import Link
from samestep.network.topologies.cables import Cables

if TYPE_CHECKING:
    from numpy import float64, int64
    from numpy.typing import NDArray

    Ints = NDArray[int64]
    Floats = NDArray[float64]

__all__: list[str] = []


class Hop(NamedTuple):
    """Some messages taking a link each.

    Attributes:
        messages: their numbers; one may come several times where it is split.
        links: the link of each.
        shares: how much of each passes there, 1 for all of it.
    """

    messages: Ints
    links: Ints
    shares: Floats


class Legs(NamedTuple):
    """Ways from router to router, one for each message.

    Attributes:
        begins: the router where each begins.
        ends: the router where each ends.
        keys: a number each, by which one of several equally short ways is taken; a host to be routed by destination.
    """

    begins: Ints
    ends: Ints
    keys: Ints


class Turn(NamedTuple):
    """What a round costs in which every rank r sends one byte to rank r + k.

    Attributes:
        latency_s: of the message that takes longest.
        loads: bytes on the most loaded link of each kind, and the link.
    """

    latency_s: float
    loads: tuple[tuple[float, Link], ...]


@dataclass(frozen=True)
class Topology(ABC):
    """A network of hosts.

    Attributes:
        cables: what its links cost.
    """

    cables: Cables
    direct: ClassVar[bool] = False  # hosts are the routers: there are no switches, and no ports [1] [2]

    @property
    @abstractmethod
    def name(self) -> str:
        """What it is, with its numbers."""

    @property
    @abstractmethod
    def hosts(self) -> int:
        """How many there are."""

    @property
    @abstractmethod
    def routers(self) -> int:
        """How many there are: all switches, or all hosts."""

    @property
    @abstractmethod
    def concentration(self) -> int:
        """Hosts at each router that has any; those routers come first."""

    @abstractmethod
    def fabric(self) -> Sequence[tuple[int, Link]]:
        """Returns how many links [3] there are of each kind, in the order of their numbers."""

    @abstractmethod
    def wire(self, number: int) -> tuple[int, int]:
        """Returns the routers that link `number` of the fabric leads from and to."""

    @abstractmethod
    def adjacent(self, router: int) -> list[int]:
        """Returns the routers that `router` has a link to."""

    @abstractmethod
    def between(self, legs: Legs, *, every: bool) -> Iterator[Hop]:
        """Yields the hops of each leg, in order; links are numbers within the fabric.

        Args:
            legs: from router to router.
            every: split evenly over all ways that are equally short, or take the one that the key says.
        """

    @property
    def ranks(self) -> int:
        """How many ranks it holds."""
        return self.hosts * self.cables.local

    @property
    def switches(self) -> int:
        """How many there are."""
        return 0 if self.direct else self.routers

    @property
    def vertices(self) -> int:
        """Hosts and switches."""
        return self.hosts + self.switches

    @property
    def links(self) -> int:
        """Directed links: a cable is two."""
        return self.first_of_fabric + sum(count for count, _ in self.fabric())

    @property
    def first_of_fabric(self) -> int:
        """The number of the first link [3]."""
        return 0 if self.direct else 2 * self.hosts

    @property
    @abstractmethod
    def diameter(self) -> int:
        """Hops between routers, at most, by the minimal routing."""

    def router(self, host: int) -> int:
        """Returns the router that `host` stands at."""
        return host // self.concentration

    def ends(self, link: int) -> tuple[int, int]:
        """Returns the vertices that `link` leads from and to."""
        if link >= self.first_of_fabric:
            tail, head = self.wire(link - self.first_of_fabric)
            return self._vertex(tail), self._vertex(head)
        host = link % self.hosts
        switch = self._vertex(self.router(host))
        return (host, switch) if link < self.hosts else (switch, host)

    def neighbours(self, vertex: int) -> list[int]:
        """Returns the vertices that `vertex` has a link to."""
        if self.direct:
            return self.adjacent(vertex)
        if vertex < self.hosts:
            return [self._vertex(self.router(vertex))]
        router = vertex - self.hosts
        first = router * self.concentration
        standing = range(first, first + self.concentration) if first < self.hosts else ()
        return [*standing, *map(self._vertex, self.adjacent(router))]

    def kinds(self) -> Sequence[tuple[int, Link]]:
        """Returns how many links there are of each kind, in the order of their numbers."""
        ports = () if self.direct else ((2 * self.hosts, self.cables.port_link),)
        return (*ports, *self.fabric())

    @cached_property
    def latencies(self) -> Floats:
        """Seconds of each link."""
        import numpy as np

        kinds = self.kinds()
        return np.repeat([float(link.latency_s) for _, link in kinds], [count for count, _ in kinds])

    @cached_property
    def bandwidths(self) -> Floats:
        """Bytes a second of each link."""
        import numpy as np

        kinds = self.kinds()
        return np.repeat([float(link.bytes_per_s) for _, link in kinds], [count for count, _ in kinds])

    def tally(self, legs: Legs, nbytes: Floats, *, every: bool) -> tuple[Floats, Floats]:
        """Returns the bytes on each link of the fabric, and the latency of each leg.

        Where ways of a message differ in latency, its latency is their mean, weighted by its bytes on each.
        """
        import numpy as np

        first = self.first_of_fabric
        load, latency = np.zeros(self.links - first), np.zeros(len(nbytes))
        for messages, links, shares in self.between(legs, every=every):
            load += np.bincount(links, nbytes[messages] * shares, len(load))
            latency += np.bincount(messages, self.latencies[first + links] * shares, len(latency))
        return load, latency

    def detour(self, legs: Legs, draws: Ints) -> list[Legs]:
        """Returns the legs of ways that lead by a random router each, as the draws say (Valiant's routing)."""
        middle = draws % self.routers
        return [Legs(legs.begins, middle, legs.keys), Legs(middle, legs.ends, legs.keys)]

    def turn(self, _distance: int) -> Turn | None:
        """Returns what it costs that the rank on every host h sends one byte to that on h + distance, if known.

        In closed form, by the minimal routing, all hosts taking part; None where the messages must be counted.
        """
        return None

    def circuit(self) -> list[int] | None:
        """Returns the routers with hosts in an order in which each is a neighbour of the next, if known.

        The last is a neighbour of the first where there is such an order. None where one must be searched for.
        """
        return None

    def _vertex(self, router: int) -> int:
        return router if self.direct else self.hosts + router

    def __str__(self) -> str:
        local = self.cables.local
        ranks = f", {local} ranks on each" if local > 1 else ""
        switches = f"{self.switches} {'switch' if self.switches == 1 else 'switches'}"
        return f"{self.name}: {self.hosts} hosts{ranks}, {switches}, {self.links} directed links"


def whole(number: int, what: str, least: int, most: int | None = None) -> int:
    """Returns the number, if it is whole and in range.

    Raises:
        UsageError: says what it is, and what it may be.
    """
    inside = isinstance(number, int) and number >= least and (most is None or number <= most)
    if inside and not isinstance(number, bool):
        return number
    span = f"{least} or more" if most is None else f"{least} to {most}"
    raise UsageError(f"{what} is {number}: give a whole number, {span}")
