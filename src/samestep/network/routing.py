"""Which way a message takes: three choices, none of which looks at what other messages do.

    minimal     the one shortest way that the topology states: dimension order, D-mod-k, one line, one cable
    ecmp        split evenly over all shortest ways (of a torus: those that its file states)
    valiant     to a random switch first, by the minimal way, and on from there: twice the way, but no hot link
                (in a fat tree: by a random top switch, which is no longer)

                     s ──▶ ▪ ──▶ t   minimal           s ──▶ ▪ ─┬─▶ t   ecmp
                                                        └──▶ ▪ ─┘

Adaptive routing, which real dragonflies and Slim Flies have (UGAL sends a message the long way where the short one is
full), is not among them: between minimal and valiant lies what it would reach.

Source: L. Valiant, "A scheme for fast parallel communication", SIAM J. Computing 11, 1982.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from samestep.errors import UsageError
from samestep.network.messages import Floats, Ints
from samestep.network.topologies.topology import Segments, Topology
from samestep.seeding import GOLDEN, derive_seed, splitmix64


@dataclass(frozen=True)
class Routing:
    """A choice of ways."""

    name: str
    split: bool = False  # evenly over all ways that are equally short
    seed: int | None = None  # of the random switches that messages go by; where None, they go straight
    parts: int = 1  # equal ones that each message is cut into, each with a random switch of its own

    def segments(self, topology: Topology, sources: Ints, targets: Ints) -> list[Segments]:
        """Returns the ways of each part of messages between hosts, from router to router."""
        each = topology.hosts_per_router
        straight = Segments(sources // each, targets // each, targets)
        if self.seed is None:
            return [straight]
        draws = (_draws(self.seed, part, sources, targets) for part in range(self.parts))
        return [segment for draw in draws for segment in topology.via_random(straight, draw)]


MINIMAL = Routing("minimal")
ECMP = Routing("ecmp", split=True)


def valiant(seed: int = 0, parts: int = 1) -> Routing:
    """Returns Valiant's routing: a pair of hosts always goes by the same random switch, or one for each part.

    Args:
        seed: of the switches.
        parts: of each message. One is a large message on one way: chance puts several on one link. Many come near to
            packets that each go their own way.

    Raises:
        UsageError: fewer than 1 part.

    Example:
        >>> valiant(seed=3, parts=16)
        Routing(name='valiant', split=False, seed=3, parts=16)
    """
    if parts < 1:
        raise UsageError(f"a message cannot be cut into {parts} parts: give 1 or more")
    return Routing("valiant", seed=seed, parts=parts)


def link_loads(
    topology: Topology, routing: Routing, sources: Ints, targets: Ints, nbytes: Floats
) -> tuple[Floats, Floats]:
    """Returns the bytes that messages between hosts put on each link, and the latency of each, overhead included.

        hosts 0 and 1 send 6 bytes each                     link 0 ──▶ switch a      6
        to hosts 2 and 3, across one cable                       1 ──▶ switch a      6
                                                            switch a ──▶ switch b   12  ◀── takes longest
          0 ─┐             ┌─ 2                                switch b ──▶ 2        6
             a ─────────── b                                   switch b ──▶ 3        6
          1 ─┘             └─ 3

    Message i is of `nbytes[i]`, from host `sources[i]` to another, `targets[i]`.

    Example:
        >>> from samestep.network.links import Link
        >>> from samestep.network.topologies.topology import LinkTypes
        >>> from samestep.network.topologies.torus import ring
        >>> network = ring(LinkTypes(Link(1e-6, 50e9)), 5)
        >>> loads, latencies = link_loads(network, MINIMAL, np.array([0]), np.array([2]), np.array([8.0]))
        >>> [network.ends(int(link)) for link in loads.nonzero()[0]], float(latencies[0])
        ([(0, 1), (1, 2)], 2e-06)
    """
    total = np.zeros(topology.links)
    latencies = np.full(len(sources), topology.link_types.overhead_s)
    if not topology.hosts_are_routers:
        hosts = topology.hosts
        total[:hosts] = np.bincount(sources, nbytes, hosts)
        total[hosts : 2 * hosts] = np.bincount(targets, nbytes, hosts)
        latencies += 2 * topology.link_types.port.latency_s
    for segments in routing.segments(topology, sources, targets):
        on_links, on_the_way = topology.link_loads(segments, nbytes / routing.parts, split=routing.split)
        total[topology.first_router_link :] += on_links
        latencies += on_the_way / routing.parts
    return total, latencies


def _draws(seed: int, part: int, sources: Ints, targets: Ints) -> Ints:
    """A random number of 62 bits for each pair: splitmix64 of both, which hangs on nothing else."""
    state = np.full(len(sources), derive_seed(seed, "valiant", part), dtype=np.uint64)
    for hosts in (sources, targets):
        state = splitmix64((state ^ hosts.astype(np.uint64)) + np.uint64(GOLDEN))
    return (state >> np.uint64(2)).astype(np.int64)
