"""Ranks on hosts: each host as often as it holds, and neighbours next to each other where a circuit is asked for."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from known_networks import CABLES, NETWORKS, PRIME_POWERS, named

from samestep.errors import UsageError
from samestep.network import placement
from samestep.network.links import Link
from samestep.network.topologies.dragonfly import Dragonfly
from samestep.network.topologies.fat_tree import FatTree
from samestep.network.topologies.slim_fly import SlimFly
from samestep.network.topologies.topology import LinkTypes
from samestep.network.topologies.torus import Torus

CHOICES = [placement.linear, placement.random, placement.circuit]


@settings(deadline=None)
@given(st.sampled_from(NETWORKS), st.sampled_from(CHOICES), st.integers(1, 3), st.data())
def test_every_host_gets_as_many_ranks_as_it_holds_until_all_are_placed(network, choice, local, data):
    if choice is placement.circuit and isinstance(network, FatTree) and network.up:
        return  # leaves are nobody's neighbours
    held = replace(network, link_types=LinkTypes(Link(1, 1), ranks_per_host=local))
    ranks = data.draw(st.integers(1, held.ranks))
    hosts = choice(held, ranks).hosts
    count = Counter(hosts)
    assert len(hosts) == ranks
    assert all(0 <= host < held.hosts for host in hosts)
    assert sorted(count.values()) == sorted(
        [*([local] * (ranks // local)), *([ranks % local] if ranks % local else [])]
    )
    assert all(hosts[rank] == hosts[rank - rank % local] for rank in range(ranks))  # ranks of a host follow each other


def test_linear_is_the_order_of_the_hosts():
    assert placement.linear(NETWORKS[1], 4).hosts == (0, 1, 2, 3)


def test_random_depends_on_the_seed_alone():
    network = SlimFly(CABLES, 7)
    drawn = [placement.random(network, 100, seed).hosts for seed in range(5)]
    assert drawn == [placement.random(network, 100, seed).hosts for seed in range(5)]
    assert len(set(drawn)) == 5


def switches_next_to_each_other(network, hosts):
    routers = [host // network.hosts_per_router for host in hosts]
    steps = zip(routers, routers[1:] + routers[:1], strict=True)
    return all(here == there or there in network.adjacent(here) for here, there in steps)


@pytest.mark.parametrize("network", [each for each in NETWORKS if not isinstance(each, FatTree)], ids=named)
def test_a_circuit_goes_from_neighbour_to_neighbour_and_back(network):
    placed = placement.circuit(network, network.hosts)
    assert sorted(placed.hosts) == list(range(network.hosts))
    if network.routers > 1:
        assert switches_next_to_each_other(network, placed.hosts)


@pytest.mark.parametrize("q", PRIME_POWERS)
def test_every_slim_fly_has_a_circuit(q):
    fly = SlimFly(CABLES, q)
    found = placement.search(fly.routers, fly.adjacent)
    assert sorted(found) == list(range(fly.routers))
    near = list(map(set, map(fly.adjacent, found)))
    assert all(there in near[at] for at, there in enumerate(found[1:] + found[:1]))


def test_a_torus_of_two_odd_sides_has_a_circuit_too():
    for dims in ((3, 5), (5, 3), (3, 3, 3), (7, 3, 5), (5, 5), (3, 7, 2)):
        torus = Torus(CABLES, dims)
        assert switches_next_to_each_other(torus, placement.circuit(torus, torus.hosts).hosts)


def test_a_circuit_of_a_dragonfly_enters_by_one_end_and_leaves_by_the_other():
    fly = Dragonfly(CABLES, 1, 4, 2)
    groups = [router // 4 for router in placement.circuit(fly, 36).hosts]
    assert groups == [group for group in range(9) for _ in range(4)]


def test_the_search_gives_up_where_there_is_none():
    star = {0: [1, 2, 3], 1: [0], 2: [0], 3: [0]}
    assert placement.search(4, star.__getitem__) is None
    assert placement.search(1, lambda _: []) == [0]


def test_a_circuit_through_leaves_is_refused():
    tree = FatTree(CABLES, (2, 3), (2,))
    with pytest.raises(UsageError, match="no circuit through the routers of fat tree .* place its ranks linearly"):
        placement.circuit(tree, 6)


@pytest.mark.parametrize("choice", CHOICES)
def test_ranks_that_do_not_fit_are_refused(choice):
    for ranks in (0, -1, 13):
        with pytest.raises(
            UsageError, match=f"{ranks} ranks do not fit torus 4x3, which holds 12 .12 hosts of 1.: give 1 to 12"
        ):
            choice(Torus(CABLES, (4, 3)), ranks)


def test_a_schedulers_choice_is_taken_if_it_fits():
    torus = Torus(LinkTypes(Link(1, 1), ranks_per_host=2), (4, 3))
    assert placement.chosen(torus, [3, 3, 11]).hosts == (3, 3, 11)
    with pytest.raises(UsageError, match="rank 2 would be number 3 on host 3, which holds 2"):
        placement.chosen(torus, [3, 3, 3])
    with pytest.raises(UsageError, match="rank 1 is on host 12 of 12: give one of 0 to 11"):
        placement.chosen(torus, [3, 12])
    with pytest.raises(UsageError, match="0 ranks do not fit"):
        placement.chosen(torus, [])
