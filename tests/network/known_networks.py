"""Small networks of every kind, and the graph of each, as its links and its neighbours state it."""

from __future__ import annotations

from collections import deque

from samestep.network.links import Link
from samestep.network.topologies.dragonfly import Dragonfly
from samestep.network.topologies.fat_tree import FatTree
from samestep.network.topologies.slim_fly import SlimFly
from samestep.network.topologies.topology import LinkTypes, Switch
from samestep.network.topologies.torus import Torus, ring

CABLES = LinkTypes(
    Link(1.0, 2.0), host_port=Link(4.0, 3.0), global_link=Link(16.0, 5.0)
)  # powers of two tell hops apart by their sum
PRIME_POWERS = [3, 4, 5, 7, 8, 9, 11, 13, 16, 17, 19, 23, 25, 27, 29, 31, 32]

NETWORKS = [
    Switch(CABLES, 1),
    Switch(CABLES, 5),
    ring(CABLES, 1),
    ring(CABLES, 2),
    ring(CABLES, 5),
    ring(CABLES, 6),
    Torus(CABLES, (4, 3)),
    Torus(CABLES, (2, 4)),
    Torus(CABLES, (4, 1, 4)),
    Torus(CABLES, (2, 4, 3)),
    Torus(CABLES, (2, 2, 2, 2)),
    FatTree(CABLES, (4,), ()),
    FatTree(CABLES, (2, 3), (2,)),
    FatTree(CABLES, (4, 4), (2,)),
    FatTree(CABLES, (2, 2, 4), (2, 2)),
    FatTree(CABLES, (3, 2, 2), (2, 3)),
    FatTree(CABLES, (2, 2, 2, 3), (2, 1, 3)),
    Dragonfly(CABLES, 2, 4, 2),
    Dragonfly(CABLES, 1, 3, 2),
    Dragonfly(CABLES, 2, 4, 2, 5),
    Dragonfly(CABLES, 3, 1, 4),
    Dragonfly(CABLES, 2, 3, 1, 1),
    SlimFly(CABLES, 3),
    SlimFly(CABLES, 4),
    SlimFly(CABLES, 5, 1),
    SlimFly(CABLES, 7, 2),
    SlimFly(CABLES, 8, 1),
    SlimFly(CABLES, 9, 1),
]


def links_of(network):
    return [network.ends(link) for link in range(network.links)]


def vertices(network):
    """Hosts, then switches."""
    return range(network.hosts + network.switches)


def neighbours(network, vertex):
    """The vertices that a vertex has a link to."""
    if network.hosts_are_routers:
        return network.adjacent(vertex)
    first_switch, each = network.hosts, network.hosts_per_router
    if vertex < first_switch:
        return [first_switch + vertex // each]
    router = vertex - first_switch
    hosts = range(router * each, (router + 1) * each) if router * each < network.hosts else ()
    return [*hosts, *(first_switch + other for other in network.adjacent(router))]


def distances(network, source):
    """Links between `source` and every vertex, by breadth-first search."""
    found, queue = {source: 0}, deque([source])
    while queue:
        vertex = queue.popleft()
        for each in neighbours(network, vertex):
            if each not in found:
                found[each] = found[vertex] + 1
                queue.append(each)
    return found


def named(network):
    return network.name
