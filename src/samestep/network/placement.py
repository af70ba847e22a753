"""Which rank runs on which host: the same job is several times slower in a bad order.

    linear      rank 0, 1, 2, ... on host 0, 1, 2, ...: what a scheduler does that gives out hosts in their order
    random      on hosts drawn at random: what is left over in a busy cluster
    circuit     along a Hamiltonian circuit of the routers: rank r + 1 is on the same router or the next
                    torus        row by row, every other row backwards (a snake), and closed
                    dragonfly    from group to group, in by one end and out by the other
                    Slim Fly     searched for (:mod:`samestep.network.circuit`)

        0   1   2         0 ─ 1 ─ 2         a ring over 6 ranks; linear: from 2 to 3 and from 5 to 0 it is two hops,
        3   4   5         5 ─ 4 ─ 3         round and down; circuit: every rank is next to the one before it
        linear            circuit

Several ranks of one host follow each other in all three.
"""

from __future__ import annotations

import random as stdlib_random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING

from samestep.errors import UsageError
from samestep.network import circuit as circuits
from samestep.network.topologies.topology import Topology
from samestep.seeding import derive_seed

if TYPE_CHECKING:
    from samestep.network.topologies.topology import Ints

__all__: list[str] = []


@dataclass(frozen=True)
class Placement:
    """The host of each rank.

    Attributes:
        name: of the choice.
        hosts: of rank 0, 1, 2, ...
    """

    name: str
    hosts: tuple[int, ...]

    @property
    def ranks(self) -> int:
        """How many are placed."""
        return len(self.hosts)

    @cached_property
    def array(self) -> Ints:
        """The hosts, for computing."""
        import numpy as np

        return np.array(self.hosts, dtype=np.int64)

    @cached_property
    def in_order(self) -> bool:
        """Whether rank r is on host r."""
        return self.hosts == tuple(range(len(self.hosts)))


def linear(topology: Topology, ranks: int) -> Placement:
    """Returns ranks on hosts in the order of their numbers.

    >>> from samestep.network.links import Link
    >>> from samestep.network.topologies.cables import Cables
    >>> from samestep.network.topologies.torus import Torus
    >>> linear(Torus(Cables(Link(1e-6, 50e9), local=2), (3, 3)), 5).hosts
    (0, 0, 1, 1, 2)

    Raises:
        UsageError: fewer than 1 rank, or more than the topology holds.
    """
    return _along("linear", range(topology.hosts), topology, ranks)


def random(topology: Topology, ranks: int, seed: int = 0) -> Placement:
    """Returns ranks on hosts drawn at random, anew for each seed.

    Raises:
        UsageError: fewer than 1 rank, or more than the topology holds.
    """
    order = list(range(topology.hosts))
    stdlib_random.Random(derive_seed(seed, "placement")).shuffle(order)  # noqa: S311 - no secret either
    return _along("random", order, topology, ranks)


def circuit(topology: Topology, ranks: int, seed: int = 0) -> Placement:
    """Returns ranks along a Hamiltonian circuit of the routers.

    >>> from samestep.network.links import Link
    >>> from samestep.network.topologies.cables import Cables
    >>> from samestep.network.topologies.torus import Torus
    >>> circuit(Torus(Cables(Link(1e-6, 50e9)), (2, 3)), 6).hosts
    (0, 1, 2, 5, 4, 3)

    Args:
        topology: to place them on.
        ranks: how many.
        seed: of the search, where there is one.

    Raises:
        UsageError: fewer than 1 rank, more than the topology holds, or no circuit found.
    """
    _check(topology, ranks)
    holding = topology.hosts // topology.concentration
    routers = topology.circuit() or circuits.search(holding, topology.adjacent, seed)
    if routers is None:
        raise UsageError(
            f"no circuit through the routers of {topology.name} was found: place its ranks linearly"
            if holding < topology.routers
            else f"no circuit through the {holding} routers of {topology.name} was found with seed {seed}: give another"
        )
    each = topology.concentration
    return _along(
        "circuit", (host for one in routers for host in range(one * each, one * each + each)), topology, ranks
    )


def chosen(topology: Topology, hosts: Sequence[int]) -> Placement:
    """Returns rank r on `hosts[r]`, as a scheduler has said.

    Raises:
        UsageError: a host that is not there, or has more ranks than it holds.
    """
    held: dict[int, int] = {}
    for rank, host in enumerate(hosts):
        held[host] = held.get(host, 0) + 1
        if not 0 <= host < topology.hosts:
            raise UsageError(
                f"rank {rank} is on host {host} of {topology.hosts}: give one of 0 to {topology.hosts - 1}"
            )
        if held[host] > topology.cables.local:
            raise UsageError(
                f"rank {rank} would be number {held[host]} on host {host}, which holds {topology.cables.local}: "
                "choose another host, or give local="
            )
    _check(topology, len(hosts))
    return Placement("chosen", tuple(hosts))


def _along(name: str, order: Iterable[int], topology: Topology, ranks: int) -> Placement:
    _check(topology, ranks)
    local = range(topology.cables.local)
    return Placement(name, tuple(islice((host for host in order for _ in local), ranks)))


def _check(topology: Topology, ranks: int) -> None:
    if not 1 <= ranks <= topology.ranks:
        raise UsageError(
            f"{ranks} ranks do not fit {topology.name}, which holds {topology.ranks} "
            f"({topology.hosts} hosts of {topology.cables.local}): give 1 to {topology.ranks}, or a larger network"
        )
