"""What every network can be asked: who its neighbours are, and which links lie on the way; by arithmetic alone.

    host 0 ─┐                                ┌─ host 4        vertices   hosts, then switches: 0, 1, 2, ...
    host 1 ─┼─ router 0 ───────── router 1 ──┼─ host 5        routers    that hosts are connected to: the switches, or
    host 2 ─┘                                └─ host 6                   the hosts themselves where there are none

    directed links, numbered without a gap
      [1] 0 .. H-1      host to its router           none where
      [2] H .. 2H-1     router to its host           hosts are routers
      [3] 2H ..         router to router, kind by kind

Nothing is stored for hosts or their pairs: a network of a billion hosts takes no more memory than one of 4. Counting
bytes takes a few numbers for each link and each message; the ways of all messages are computed together, in numpy
arrays, hop by hop.

Simulators keep routes in tables (SimGrid's Floyd zones, networkx's all-pairs paths), quadratic in the hosts.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple

import numpy as np

from samestep.errors import UsageError
from samestep.network.links import Link
from samestep.network.messages import Floats, Ints
from samestep.parsing import whole


@dataclass(frozen=True)
class LinkTypes:
    """What the links of a network cost; each link carries its bandwidth both ways at once.

        rank ══intra_host══ rank                                 two ranks of one host; the network is not asked
        rank                                                    rank
          └ host ──host_port── switch ──router── switch ──host_port── host
                                 └──global_link── switch of another group (dragonfly)

    A message takes the latency of every link that it passes, and `overhead_s` once, for its two ends together: what is
    measured from rank to rank is overhead and links in one. A data sheet has the links alone.

    Attributes:
        router: from a switch to a switch, or from a host to a host where there are no switches.
        host_port: from a host to its switch; where None, the same as `router`.
        global_link: from a group of a dragonfly to another; where None, the same as `router`.
        intra_host: from a rank to another on its host; where None, the same as `host_port`.
        ranks_per_host: ranks on each host.
        overhead_s: seconds that a message takes beside its links, at both ends together.

    Raises:
        UsageError: fewer than 1 rank on a host, or an overhead or latency that is negative or infinite.

    Example:
        >>> link_types = LinkTypes(router=Link(0.5e-6, 25e9), intra_host=Link(2e-6, 300e9), ranks_per_host=8)
        >>> link_types.port == link_types.router
        True
    """

    router: Link
    host_port: Link | None = None
    global_link: Link | None = None
    intra_host: Link | None = None
    ranks_per_host: int = 1
    overhead_s: float = 0.0

    def __post_init__(self) -> None:
        if self.ranks_per_host < 1:
            raise UsageError(f"ranks_per_host is {self.ranks_per_host}: give 1 or more")
        if not 0 <= self.overhead_s < math.inf:
            raise UsageError(f"a message takes {self.overhead_s} s beside its links: give seconds, 0 or more")
        for name in ("router", "host_port", "global_link", "intra_host"):
            link = getattr(self, name)
            if link is not None and not math.isfinite(link.latency_s):
                raise UsageError(f"the latency of link {name!r} is {link.latency_s} s: give seconds, 0 or more")

    @property
    def port(self) -> Link:
        """From a host to its switch."""
        return self.host_port or self.router

    @property
    def far(self) -> Link:
        """From a group to another."""
        return self.global_link or self.router

    @property
    def inside(self) -> Link:
        """From a rank to another on its host."""
        return self.intra_host or self.port


class Size(NamedTuple):
    name: str  # the kind of network, with its numbers
    hosts: int  # how many there are
    routers: int  # all switches, or all hosts
    hosts_per_router: int  # at each router that has any; those routers come first
    diameter: int  # hops between routers, at most, by the minimal routing


class Hop(NamedTuple):
    """Some messages taking a link each."""

    messages: Ints  # their numbers; one may come several times where it is split
    links: Ints  # the link of each
    shares: Floats  # how much of each passes there, 1 for all of it


class Segments(NamedTuple):
    """Ways from router to router, one for each message."""

    begins: Ints  # the router where each begins
    ends: Ints  # the router where each ends
    # a number each, by which one of several equally short ways is taken; a host to be routed by destination
    path_hash: Ints


@dataclass(frozen=True)
class Topology(ABC):
    """A network of hosts."""

    link_types: LinkTypes  # what its links cost
    hosts_are_routers: ClassVar[bool] = False  # there are no switches, and no ports [1] [2]

    @cached_property
    @abstractmethod
    def size(self) -> Size:
        """How large it is."""

    @abstractmethod
    def link_counts(self) -> Sequence[tuple[int, Link]]:
        """Returns how many links [3] there are of each kind, in the order of their numbers."""

    @abstractmethod
    def link_ends(self, number: int) -> tuple[int, int]:
        """Returns the routers that link `number` of [3] leads from and to."""

    @abstractmethod
    def adjacent(self, router: int) -> list[int]:
        """Returns the routers that `router` has a link to."""

    @abstractmethod
    def hops(self, segments: Segments, *, split: bool) -> Iterator[Hop]:
        """Yields the hops of each segment, in order; links are numbers within [3].

        Args:
            segments: from router to router.
            split: evenly over all ways that are equally short, or take the one that the path hash says.
        """

    @property
    def name(self) -> str:
        return self.size.name

    @property
    def hosts(self) -> int:
        return self.size.hosts

    @property
    def routers(self) -> int:
        return self.size.routers

    @property
    def hosts_per_router(self) -> int:
        return self.size.hosts_per_router

    @property
    def diameter(self) -> int:
        return self.size.diameter

    @property
    def ranks(self) -> int:
        return self.hosts * self.link_types.ranks_per_host

    @property
    def switches(self) -> int:
        return 0 if self.hosts_are_routers else self.routers

    @property
    def links(self) -> int:
        """Directed links: a cable is two."""
        return self.first_router_link + sum(count for count, _ in self.link_counts())

    @property
    def first_router_link(self) -> int:
        """The number of the first link [3]."""
        return 0 if self.hosts_are_routers else 2 * self.hosts

    def ends(self, link: int) -> tuple[int, int]:
        """Returns the vertices that `link` leads from and to."""
        if link >= self.first_router_link:
            tail, head = self.link_ends(link - self.first_router_link)
            return self._vertex(tail), self._vertex(head)
        host = link % self.hosts
        switch = self._vertex(host // self.hosts_per_router)
        return (host, switch) if link < self.hosts else (switch, host)

    @cached_property
    def latencies(self) -> Floats:
        """Seconds of each link."""
        return self._of_links([float(link.latency_s) for _, link in self._kinds])

    @cached_property
    def bandwidths(self) -> Floats:
        """Bytes a second of each link."""
        return self._of_links([float(link.bytes_per_s) for _, link in self._kinds])

    def link_loads(self, segments: Segments, nbytes: Floats, *, split: bool) -> tuple[Floats, Floats]:
        """Returns the bytes on each link [3], and the latency of each segment.

        Where ways of a message differ in latency, its latency is their mean, weighted by its bytes on each.
        """
        first = self.first_router_link
        load, latency = np.zeros(self.links - first), np.zeros(len(nbytes))
        for messages, links, shares in self.hops(segments, split=split):
            load += np.bincount(links, nbytes[messages] * shares, len(load))
            latency += np.bincount(messages, self.latencies[first + links] * shares, len(latency))
        return load, latency

    def via_random(self, segments: Segments, draws: Ints) -> list[Segments]:
        """Returns the segments of ways that lead by a random router each, as the draws say (Valiant's routing)."""
        middle = draws % self.routers
        first = Segments(segments.begins, middle, segments.path_hash)
        return [first, Segments(middle, segments.ends, segments.path_hash)]

    def circuit(self) -> list[int] | None:
        """Returns the routers with hosts in an order in which each is a neighbour of the next, if known.

        The last is a neighbour of the first where there is such an order. None where one must be searched for.
        """
        return None

    def _of_links(self, values: Sequence[float]) -> Floats:
        return np.repeat(values, [count for count, _ in self._kinds])

    @property
    def _kinds(self) -> Sequence[tuple[int, Link]]:
        """How many links there are of each kind, in the order of their numbers."""
        ports = () if self.hosts_are_routers else ((2 * self.hosts, self.link_types.port),)
        return (*ports, *self.link_counts())

    def _vertex(self, router: int) -> int:
        return router if self.hosts_are_routers else self.hosts + router

    def __str__(self) -> str:
        local = self.link_types.ranks_per_host
        ranks = f", {local} ranks on each" if local > 1 else ""
        switches = f"{self.switches} {'switch' if self.switches == 1 else 'switches'}"
        return f"{self.name}: {self.hosts} hosts{ranks}, {switches}, {self.links} directed links"


@dataclass(frozen=True)
class Switch(Topology):
    """One switch that all hosts are connected to: no message waits but at its hosts' own ports.

    Attributes:
        ports: one for each host.

    Example:
        >>> print(Switch(LinkTypes(Link(1e-6, 12.5e9)), ports=16))
        switch of 16 ports: 16 hosts, 1 switch, 32 directed links
    """

    ports: int

    def __post_init__(self) -> None:
        whole(1)(self.ports, "the number of a switch's ports")

    @cached_property
    def size(self) -> Size:
        return Size(f"switch of {self.ports} ports", self.ports, 1, self.ports, 0)

    def link_counts(self) -> tuple[tuple[int, Link], ...]:
        return ()

    def link_ends(self, number: int) -> tuple[int, int]:
        raise IndexError(number)

    def adjacent(self, _router: int) -> list[int]:
        return []

    def hops(self, _segments: Segments, *, split: bool) -> Iterator[Hop]:  # noqa: ARG002 - all ways are of no hops
        return iter(())

    def circuit(self) -> list[int]:
        return [0]
