"""What one round puts on every link: the bytes that pass, the link that takes longest with them, and so the time.

    hosts 0 and 1 send 6 bytes each                     link 0 ──▶ switch a      6
    to hosts 2 and 3, across one cable                       1 ──▶ switch a      6
                                                        switch a ──▶ switch b   12  ◀── takes longest
      0 ─┐             ┌─ 2                                switch b ──▶ 2        6
         a ─────────── b                                   switch b ──▶ 3        6
      1 ─┘             └─ 3

    seconds of the round = the latency of the message that takes longest + max over links of bytes / bandwidth

No link can carry its bytes in less time, so the second term is never too long. It is exact where the busiest link is
busy all the while; where its messages are held up elsewhere, sharing links fairly wastes some of it. The sum is too
long where the message of most hops does not pass the busiest link. SimGrid, whose max-min flows follow every message in
time, agrees within 1 % on ranks in order, and on ranks at random but for some rounds of a torus (docs/topologies.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from samestep.network.routing import Routing
from samestep.network.topologies.topology import Topology

if TYPE_CHECKING:
    from samestep.network.topologies.topology import Floats, Ints

__all__: list[str] = []


@dataclass(frozen=True, eq=False)
class Load:
    """The bytes of one round.

    Attributes:
        topology: whose links these are.
        nbytes: on each link.
        latencies: of each message, overhead included.
    """

    topology: Topology
    nbytes: Floats
    latencies: Floats

    @cached_property
    def busiest(self) -> int | None:
        """The link that takes longest; None where nothing is sent."""
        import numpy as np

        if not self.nbytes.any():
            return None
        return int(np.argmax(self.nbytes / self.topology.bandwidths))

    @property
    def transfer_s(self) -> float:
        """Seconds that the busiest link takes."""
        if self.busiest is None:
            return 0.0
        return float(self.nbytes[self.busiest] / self.topology.bandwidths[self.busiest])

    @property
    def latency_s(self) -> float:
        """Of the message that takes longest."""
        return float(self.latencies.max(initial=0))

    @property
    def seconds(self) -> float:
        """The whole round."""
        return self.latency_s + self.transfer_s

    def beside(self, other: Load) -> Load:
        """Returns what both put on the links at once."""
        import numpy as np

        latencies = np.array([max(self.latency_s, other.latency_s)])
        return Load(self.topology, self.nbytes + other.nbytes, latencies)

    def by_link(self) -> dict[tuple[int, int], float]:
        """Returns the bytes between vertices, of links that carry any.

        >>> from samestep.network.links import Link
        >>> from samestep.network.routing import MINIMAL
        >>> from samestep.network.topologies.cables import Cables
        >>> from samestep.network.topologies.torus import ring
        >>> import numpy as np
        >>> load(ring(Cables(Link(1e-6, 50e9)), 5), MINIMAL, np.array([0]), np.array([2]), np.array([8.0])).by_link()
        {(0, 1): 8.0, (1, 2): 8.0}
        """
        return {self.topology.ends(int(link)): float(self.nbytes[link]) for link in self.nbytes.nonzero()[0]}


def load(topology: Topology, routing: Routing, sources: Ints, targets: Ints, nbytes: Floats) -> Load:
    """Returns what messages between hosts put on the links.

    Args:
        topology: of the hosts.
        routing: which ways they take.
        sources: the host that each message comes from.
        targets: the host that each goes to, never the same.
        nbytes: of each.
    """
    import numpy as np

    total = np.zeros(topology.links)
    latencies = np.full(len(sources), topology.cables.overhead_s)
    if not topology.direct:
        hosts = topology.hosts
        total[:hosts] = np.bincount(sources, nbytes, hosts)
        total[hosts : 2 * hosts] = np.bincount(targets, nbytes, hosts)
        latencies += 2 * topology.cables.port_link.latency_s
    for legs in routing.legs(topology, sources, targets):
        on_links, on_the_way = topology.tally(legs, nbytes / routing.parts, every=routing.every)
        total[topology.first_of_fabric :] += on_links
        latencies += on_the_way / routing.parts
    return Load(topology, total, latencies)
