"""Which rank runs on which host: the same job is several times slower in a bad order.

    linear      rank 0, 1, 2, ... on host 0, 1, 2, ...: what a scheduler does that gives out hosts in their order
    random      on hosts drawn at random: what is left over in a busy cluster
    circuit     along a Hamiltonian circuit of the routers: rank r + 1 is on the same router or the next
                    torus        row by row, every other row backwards (a snake), and closed
                    dragonfly    from group to group, in by one end and out by the other
                    Slim Fly     searched for (:func:`search`)

        0   1   2         0 ─ 1 ─ 2         a ring over 6 ranks; linear: from 2 to 3 and from 5 to 0 it is two hops,
        3   4   5         5 ─ 4 ─ 3         round and down; circuit: every rank is next to the one before it
        linear            circuit

Several ranks of one host follow each other in all three.
"""

from __future__ import annotations

import random as stdlib_random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import numpy as np

from samestep.errors import UsageError
from samestep.network.messages import Ints
from samestep.network.topologies.topology import Topology
from samestep.seeding import derive_seed


@dataclass(frozen=True)
class Placement:
    """The host of each rank."""

    name: str
    hosts: tuple[int, ...]  # of rank 0, 1, 2, ...

    @property
    def ranks(self) -> int:
        return len(self.hosts)

    @cached_property
    def array(self) -> Ints:
        return np.array(self.hosts, dtype=np.int64)


def linear(topology: Topology, ranks: int) -> Placement:
    """Returns ranks on hosts in the order of their numbers.

    >>> from samestep.network.links import Link
    >>> from samestep.network.topologies.topology import LinkTypes
    >>> from samestep.network.topologies.torus import Torus
    >>> linear(Torus(LinkTypes(Link(1e-6, 50e9), ranks_per_host=2), (3, 3)), 5).hosts
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
    """Returns ranks along a Hamiltonian circuit of the routers; `seed` is of the search, where there is one.

    >>> from samestep.network.links import Link
    >>> from samestep.network.topologies.topology import LinkTypes
    >>> from samestep.network.topologies.torus import Torus
    >>> circuit(Torus(LinkTypes(Link(1e-6, 50e9)), (2, 3)), 6).hosts
    (0, 1, 2, 5, 4, 3)

    Raises:
        UsageError: fewer than 1 rank, more than the topology holds, or no circuit found.
    """
    _check(topology, ranks)
    holding = topology.hosts // topology.hosts_per_router
    routers = topology.circuit() or search(holding, topology.adjacent, seed)
    if routers is None:
        raise UsageError(
            f"no circuit through the routers of {topology.name} was found: place its ranks linearly"
            if holding < topology.routers
            else f"no circuit through the {holding} routers of {topology.name} was found with seed {seed}: give another"
        )
    each = topology.hosts_per_router
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
        if held[host] > topology.link_types.ranks_per_host:
            raise UsageError(
                f"rank {rank} would be number {held[host]} on host {host}, which holds "
                f"{topology.link_types.ranks_per_host}: choose another host, or give ranks_per_host="
            )
    _check(topology, len(hosts))
    return Placement("chosen", tuple(hosts))


def search(vertices: int, neighbours: Callable[[int], Sequence[int]], seed: int = 0) -> list[int] | None:
    """Returns a circuit of the vertices 0 to n - 1, by Posa's rotations, or None where none was found.

        [1] extend     a ─ b ─ c ─ d        d has a neighbour e that is not on the path:  a ─ b ─ c ─ d ─ e
        [2] rotate     a ─ b ─ c ─ d        all of d's are: with d ─ b, reverse what is behind b:  a ─ b ─ d ─ c
                           └───────┘        and go on from c
        [3] close      all are on the path, and the last is a neighbour of the first; until then, rotate

    A random graph of such degree yields one after about n log n steps, and so do Slim Flies of every q up to 43, in a
    second. Where nothing is found nothing is proved: the question is NP-complete.

    Sources: L. Posa, "Hamiltonian circuits in random graphs", Discrete Mathematics 14, 1976; D. Angluin and L. Valiant,
    "Fast probabilistic algorithms for Hamiltonian circuits and matchings", JCSS 18, 1979.

    Of a vertex's neighbours those from n on are left out.

    Example:
        >>> search(5, lambda vertex: [(vertex + 1) % 5]), search(3, lambda vertex: [(vertex + 1) % 2])
        ([0, 1, 2, 3, 4], None)
    """
    draw = stdlib_random.Random(derive_seed(seed, "circuit"))  # noqa: S311 - an order of hosts is no secret
    near = [[each for each in neighbours(vertex) if each < vertices] for vertex in range(vertices)]
    if vertices > 1 and not all(near):
        return None
    path, place = [0], {0: 0}
    for _ in range(100 * vertices * max(1, vertices.bit_length())):
        last = path[-1]
        if len(path) == vertices and (path[0] in near[last] or vertices == 1):
            return path  # [3]
        fresh = [each for each in near[last] if each not in place]
        if fresh:
            one = draw.choice(fresh)
            place[one] = len(path)
            path.append(one)  # [1]
        else:
            at = place[draw.choice(near[last])] + 1
            path[at:] = reversed(path[at:])  # [2]
            for number in range(at, len(path)):
                place[path[number]] = number
    return None


def _along(name: str, order: Iterable[int], topology: Topology, ranks: int) -> Placement:
    _check(topology, ranks)
    local = range(topology.link_types.ranks_per_host)
    return Placement(name, tuple(islice((host for host in order for _ in local), ranks)))


def _check(topology: Topology, ranks: int) -> None:
    if not 1 <= ranks <= topology.ranks:
        raise UsageError(
            f"{ranks} ranks do not fit {topology.name}, which holds {topology.ranks} "
            f"({topology.hosts} hosts of {topology.link_types.ranks_per_host}): give 1 to {topology.ranks}, or a "
            "larger network"
        )
