"""What a cluster offers, as the planner asks for it: the all-reduces of :mod:`samestep.network.offers` as lines.

    all-reduce of a group of replicas     a latency and so much a byte: buckets of any size are priced at once
    message from stage to stage           the slowest of all that are sent at once

Where replicas are of several stages, all stages sum at once, each among every so-many-th rank, and meet at the hosts'
ports. What takes longest to count, double trees and a server on every rank, is left out beyond FEW ranks. Over the
memory of one host, whose bandwidth all its ranks share, goes samestep's own all-reduce.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from samestep.network.cluster import Cluster
from samestep.network.contention import contended_price
from samestep.network.links import Link
from samestep.network.offers import Offer, offers
from samestep.network.rounds import Round
from samestep.planning.fabric import Sum, line

__all__: list[str] = []

FEW = 256  # ranks up to which every all-reduce is counted


@dataclass(frozen=True)
class Offered:
    r"""The fabric of a cluster.

    Attributes:
        cluster: as its file says.

    Example:
        >>> from samestep.network.cluster import parse
        >>> fabric = Offered(parse('nodes.count = 8\nlinks.between = { latency = "5 us", bandwidth = "1 GB/s" }'))
        >>> print(next(one for one in fabric.sums(8, 1, 1e6) if one.name == "ring"))
        Sum(name='ring', link=Link(latency_s=7e-05, bytes_per_s=571428571.0))
    """

    cluster: Cluster
    _offers: dict[tuple[int, int], list[Offer]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _hops: dict[tuple[int, int], Link] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def ranks(self) -> int:
        """How many there can be."""
        return self.cluster.ranks

    def sums(self, replicas: int, stages: int, nbytes: float) -> Sequence[Sum]:
        """Returns every algorithm's latency and bandwidth."""
        key = replicas, stages
        if key not in self._offers:
            found = offers(self.cluster, replicas, stages, quickly=replicas * stages > FEW)
            self._offers[key] = [one for one in found if one.ways]
        sums = [Sum(one.name, line(one.seconds, nbytes)) for one in self._offers[key]]
        return [*sums, *self._shared(replicas * stages)]

    def hop(self, replicas: int, stages: int) -> Link:
        """Returns what is between stages while all replicas send at once."""
        import numpy as np

        key = replicas, stages
        if key not in self._hops:
            ranks = np.arange(replicas * stages)
            senders = ranks[ranks % stages < stages - 1]
            each = Round(senders, senders + 1, np.full(len(senders), 1e9))
            placed = self.cluster.place(replicas * stages)
            cost = contended_price([each], self.cluster.topology, placed, self.cluster.routing).price
            self._hops[key] = Link(float(f"{cost.latency_s:.9g}"), float(f"{1e9 / cost.transfer_s:.9g}"))
        return self._hops[key]

    def _shared(self, ranks: int) -> Iterator[Sum]:
        """All-reduces in the memory of the one host, whose bandwidth all ranks share."""
        shared = self.cluster.shared
        if shared is not None and ranks <= self.cluster.devices:
            yield Sum("shared memory", Link(shared.latency_s, shared.bytes_per_s / ranks))
