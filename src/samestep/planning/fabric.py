"""What a cluster does for a way of using it: all-reduces among replicas, and messages from stage to stage.

4 hosts of 4 devices, replicas of 2 stages     ranks of a replica are neighbours, so the replicas' all-reduces go
  host 0   0a 0b 1a 1b                         from every second device to every second device: two at once
  host 1   2a 2b 3a 3b                         through each host's NIC, which has half its bandwidth for either

All stages sum their gradients at once, each among every so-many-th rank, and share the hosts' ports. What takes longest
to count, double trees and a server on every rank, is left out beyond FEW ranks. In the memory of one host, whose
bandwidth all its ranks share, runs samestep's own all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from samestep.collectives.choose import all_reduces
from samestep.collectives.plan import Plan
from samestep.network.cluster import Cluster
from samestep.network.links import Link
from samestep.network.messages import Messages, remap, send
from samestep.network.pricing import CollectivePrice, PlacedNetwork, price_lines

FEW = 256  # ranks up to which every all-reduce is counted
DOUBLE_TREE = "double tree"
CHUNKS = (1, 2, 4, 8, 16, 32, 64)  # near the best number seconds are flat: half or twice of it costs a few per cent


@dataclass(frozen=True)
class AllReduceOption:
    name: str  # of the algorithm
    link: Link  # seconds of n bytes, as latency and bytes a second


@dataclass(frozen=True)
class ClusterFabric:
    r"""The all-reduces and stage links of a cluster, or of one that is better in some way.

    Example:
        >>> from samestep.network.cluster import parse
        >>> text = 'nodes.count = 8\nlinks.between = { latency = "5 us", bandwidth = "1 GB/s" }'
        >>> print(ClusterFabric(parse(text), only="ring").all_reduces(8, 1, 1e6)[0])
        AllReduceOption(name='ring', link=Link(latency_s=7e-05, bytes_per_s=571428571.0))
    """

    cluster: Cluster  # as its file says
    latency_scale: float = 1.0  # times the latency of all links
    bandwidth_scale: float = 1.0  # times their bandwidth
    bytes_scale: float = 1.0  # bytes that an all-reduce sends for each byte of a gradient
    coding_s: float = 0.0  # seconds a byte to encode and decode gradients
    only: str = ""  # the name of the one all-reduce that may be taken; any where empty
    # what was counted of the cluster; `dataclasses.replace` hands it on to a fabric that is scaled otherwise
    _prices: dict[tuple[int, int], dict[str, list[CollectivePrice]]] = field(
        default_factory=dict, repr=False, compare=False
    )
    _links: dict[tuple[int, int], Link] = field(default_factory=dict, repr=False, compare=False)

    @property
    def ranks(self) -> int:
        return self.cluster.ranks

    def all_reduces(self, replicas: int, stages: int, nbytes: float) -> list[AllReduceOption]:
        """Returns the all-reduces of about `nbytes` among replicas, while those of all stages are under way."""
        key = replicas, stages
        if key not in self._prices:
            self._prices[key] = count_all_reduces(self.cluster, replicas, stages)
        found = [AllReduceOption(name, line(some, nbytes)) for name, some in self._prices[key].items()]
        shared = self.cluster.shared
        if shared is not None and replicas * stages <= self.cluster.devices:
            bandwidth = shared.bytes_per_s / (replicas * stages)  # which all ranks of the host share
            found.append(AllReduceOption("shared memory", Link(shared.latency_s, bandwidth)))
        return [AllReduceOption(one.name, self._scaled(one.link)) for one in found if self.only in ("", one.name)]

    def stage_link(self, replicas: int, stages: int) -> Link:
        """Returns what is between one stage and the next, while all replicas send at once."""
        key = replicas, stages
        if key not in self._links:
            everyone, nbytes = np.arange(replicas * stages), 1e9
            senders = everyone[everyone % stages < stages - 1]
            network = PlacedNetwork(self.cluster.topology, self.cluster.place(len(everyone)), self.cluster.routing)
            cost = network.price([send(senders, senders + 1)], nbytes).price
            self._links[key] = Link(float(f"{cost.latency_s:.9g}"), float(f"{nbytes / cost.transfer_s:.9g}"))
        link = self._links[key]
        return Link(link.latency_s * self.latency_scale, link.bytes_per_s * self.bandwidth_scale)

    def _scaled(self, link: Link) -> Link:
        if (self.latency_scale, self.bandwidth_scale, self.bytes_scale, self.coding_s) == (1, 1, 1, 0):
            return link
        each = self.bytes_scale / (link.bytes_per_s * self.bandwidth_scale) + self.coding_s
        return Link(link.latency_s * self.latency_scale, 1 / each if each else float("inf"))


def count_all_reduces(
    cluster: Cluster, replicas: int, stages: int = 1, *, few: int = FEW
) -> dict[str, list[CollectivePrice]]:
    """Returns the prices of every all-reduce by its name, one or several for different numbers of chunks.

    As many all-reduces among `replicas` ranks take place at once as there are stages. Up to `few` ranks those are
    counted, too, that take longest.
    """
    ranks = replicas * stages
    network = PlacedNetwork(cluster.topology, cluster.place(ranks), cluster.routing)
    local = cluster.devices // stages if cluster.devices % stages == 0 else None
    found: dict[str, list[CollectivePrice]] = {}
    for plan in all_reduces(replicas, local, CHUNKS):
        name = DOUBLE_TREE if plan.name.startswith(DOUBLE_TREE) else plan.name
        if ranks <= few or name not in (DOUBLE_TREE, f"{replicas} servers"):
            one = _InGroups(ranks, plan.blocks, _in_groups(plan, stages))
            found.setdefault(name, []).append(price_lines(one, cluster.links, network))
    return found


class _InGroups(NamedTuple):
    ranks: int
    blocks: int
    make_rounds: Callable[[], Iterable[Messages]]


def _in_groups(plan: Plan, stages: int) -> Callable[[], Iterable[Messages]]:
    """The rounds of as many groups as there are stages, each of which has every so-many-th rank."""
    if stages == 1:
        return plan.make_rounds
    members = np.arange(plan.ranks * stages).reshape(plan.ranks, stages).T
    return lambda: remap(plan.make_rounds(), members)


def line(prices: Iterable[CollectivePrice], nbytes: float) -> Link:
    """Returns the link that takes as long as an all-reduce of `nbytes`, and as one of an eighth.

    Most cost a latency and so much a byte. One that is cut into more chunks the longer it is lies a little below its
    line in between.
    """
    few, many = (min(one.seconds(size) for one in prices) for size in (nbytes / 8, nbytes))
    each = (many - few) / (nbytes * 7 / 8) if nbytes else 0.0
    latency = max(0.0, many - nbytes * each)
    return Link(float(f"{latency:.9g}"), float(f"{1 / each:.9g}") if each > 0 else float("inf"))
