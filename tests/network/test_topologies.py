"""What every network must be, whichever it is: the arithmetic and the graph agree."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from known_networks import CABLES, NETWORKS, distances, links_of, named, neighbours, vertices

from samestep.errors import UsageError
from samestep.network.links import Link
from samestep.network.topologies.dragonfly import Dragonfly
from samestep.network.topologies.fat_tree import of_ports
from samestep.network.topologies.topology import LinkTypes, Switch
from samestep.network.topologies.torus import Torus

every_network = pytest.mark.parametrize("network", NETWORKS, ids=named)


@every_network
def test_links_are_numbered_once_and_lead_to_neighbours(network):
    links = links_of(network)
    assert len(set(links)) == network.links
    assert set(links) == {(vertex, each) for vertex in vertices(network) for each in neighbours(network, vertex)}


@every_network
def test_every_link_has_one_the_other_way(network):
    links = set(links_of(network))
    assert {(head, tail) for tail, head in links} == links
    assert all(tail != head for tail, head in links)


@every_network
def test_no_vertex_has_a_neighbour_twice(network):
    assert all(max(Counter(neighbours(network, vertex)).values(), default=1) == 1 for vertex in vertices(network))


@every_network
def test_all_is_connected_within_the_diameter(network):
    ports = 0 if network.hosts_are_routers else 2
    for host in range(0, network.hosts, max(1, network.hosts // 40)):
        found = distances(network, host)
        assert len(found) == len(vertices(network))
        others = [found[other] for other in range(network.hosts) if other != host]
        assert max(others, default=0) <= network.diameter + ports
    if network.hosts > network.hosts_per_router and not isinstance(network, Dragonfly):
        assert max(others) == network.diameter + ports  # from the last host, all routers being alike


@every_network
def test_hosts_stand_at_the_first_routers_evenly(network):
    standing = Counter(host // network.hosts_per_router for host in range(network.hosts))
    assert set(standing.values()) == {network.hosts_per_router}
    assert sorted(standing) == list(range(len(standing)))


@every_network
def test_links_cost_what_their_kind_costs(network):
    assert len(network.latencies) == len(network.bandwidths) == network.links
    assert set(network.latencies[: network.first_router_link]) <= {CABLES.port.latency_s}
    assert set(network.latencies[network.first_router_link :]) <= {CABLES.router.latency_s, CABLES.far.latency_s}


@pytest.mark.parametrize(
    "network",
    [
        Torus(CABLES, (1000, 1000, 1000)),
        of_ports(CABLES, 1588),
        Dragonfly(CABLES, 126, 252, 126),
    ],
    ids=named,
)
def test_a_billion_hosts_are_numbers_only(network):
    last = network.hosts - 1
    assert last > 9e8
    assert all(last in neighbours(network, each) for each in neighbours(network, last))
    for link in (0, network.links // 2, network.links - 1):
        tail, head = network.ends(link)
        assert max(tail, head) < len(vertices(network))


def test_a_network_holds_as_many_ranks_as_its_hosts():
    assert Switch(LinkTypes(Link(1, 1), ranks_per_host=8), 5).ranks == 40
    assert (
        str(Switch(LinkTypes(Link(1, 1), ranks_per_host=8), 5))
        == "switch of 5 ports: 5 hosts, 8 ranks on each, 1 switch, 10 directed links"
    )


@pytest.mark.parametrize("network", NETWORKS, ids=named)
def test_a_stated_circuit_is_one(network):
    circuit = network.circuit()
    if circuit is None:
        return
    assert sorted(circuit) == list(range(network.routers))
    if len(circuit) > 1:
        assert all(
            there in network.adjacent(here) for here, there in zip(circuit, circuit[1:] + circuit[:1], strict=True)
        )


def test_link_types_default_to_each_other():
    plain = LinkTypes(Link(1, 2))
    assert plain.port == plain.far == plain.inside == Link(1, 2)
    assert LinkTypes(Link(1, 2), host_port=Link(3, 4)).inside == Link(3, 4)


def test_link_types_that_cannot_be_are_refused():
    with pytest.raises(UsageError, match="ranks_per_host is 0: give 1 or more"):
        LinkTypes(Link(1, 1), ranks_per_host=0)
    with pytest.raises(UsageError, match="a message takes -1.0 s beside its links: give seconds, 0 or more"):
        LinkTypes(Link(1, 1), overhead_s=-1.0)
    with pytest.raises(UsageError, match="the latency of link 'global_link' is inf s"):
        LinkTypes(Link(1, 1), global_link=Link(math.inf, 1))
    for latency, bandwidth in ((-1e-6, 1), (1e-6, 0), (1e-6, -5), (1e-6, math.nan)):
        with pytest.raises(UsageError, match="give a latency of 0 or more and a bandwidth above 0"):
            LinkTypes(Link(latency, bandwidth))


def test_a_switch_without_ports_is_refused():
    with pytest.raises(UsageError, match="the number of a switch's ports is 0: give a whole number, 1 or more"):
        Switch(CABLES, 0)
