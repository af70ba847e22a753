"""Fat trees: counts, bisection, and destinations that never meet on the way."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from known_networks import CABLES, neighbours, vertices
from ways import flow, path

from samestep.errors import UsageError
from samestep.network.routing import ECMP, MINIMAL, link_loads
from samestep.network.topologies.fat_tree import FatTree, leaf_spine, of_ports

TREES = [
    FatTree(CABLES, (2, 4), (2,)),
    FatTree(CABLES, (4, 4), (2,)),
    FatTree(CABLES, (2, 2, 4), (2, 2)),
    FatTree(CABLES, (3, 2, 2), (2, 3)),
    FatTree(CABLES, (4, 4, 2), (2, 1)),
]


@pytest.mark.parametrize("k", [2, 4, 6, 8])
def test_switches_of_k_ports_make_k_cubed_over_four_hosts(k):
    tree = of_ports(CABLES, k)
    assert (tree.hosts, tree.switches) == (k**3 // 4, 5 * k**2 // 4)
    assert {len(neighbours(tree, vertex)) for vertex in vertices(tree)[tree.hosts :]} == {k}
    assert tree.diameter == 4
    assert (tree.oversubscription, tree.bisection) == (1, tree.hosts // 2)


def test_oversubscription_is_hosts_for_each_cable_up():
    assert of_ports(CABLES, 12, oversubscription=2).oversubscription == 2
    assert {len(neighbours(of_ports(CABLES, 12, 2), 432 * 2 // 3 * 2 + leaf)) for leaf in range(72)} == {12}
    assert leaf_spine(CABLES, leaves=16, hosts=16, spines=4).oversubscription == 4
    assert FatTree(CABLES, (4, 4, 2), (4, 1)).oversubscription == 4  # the narrowest level counts
    assert leaf_spine(CABLES, leaves=4, hosts=2, spines=8).oversubscription == 1


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree.name)
def test_the_bisection_is_the_flow_between_the_halves(tree):
    networkx = pytest.importorskip("networkx", reason="maximum flow is taken from networkx")
    graph = networkx.DiGraph()
    for link in range(tree.links):
        graph.add_edge(*tree.ends(link), capacity=1)
    half = tree.hosts // 2
    for host in range(tree.hosts):
        graph.add_edge(*(("left", host) if host < half else (host, "right")), capacity=1)
    assert networkx.maximum_flow_value(graph, "left", "right") == tree.bisection


def test_a_tree_that_cannot_be_halved_has_no_bisection():
    assert FatTree(CABLES, (2, 3), (2,)).bisection is None


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree.name)
def test_ways_to_one_host_never_part_again(tree):
    for target in range(tree.hosts):
        after = {}
        for source in range(tree.hosts):
            for here, there in pairwise(path(tree, MINIMAL, source, target)):
                assert after.setdefault(here, there) == there


@pytest.mark.parametrize("tree", [leaf_spine(CABLES, 4, 4, 4), of_ports(CABLES, 4), of_ports(CABLES, 6)], ids=str)
def test_shifts_meet_nowhere_in_a_non_blocking_tree(tree):
    hosts = np.arange(tree.hosts)
    for distance in range(1, tree.hosts):
        targets = (hosts + distance) % tree.hosts
        assert link_loads(tree, MINIMAL, hosts, targets, np.ones(tree.hosts))[0].max() == 1


def test_a_shift_between_leaves_shares_the_links_that_are_left():
    tree = leaf_spine(CABLES, leaves=4, hosts=4, spines=2)
    hosts = np.arange(16)
    shifted, _ = link_loads(tree, MINIMAL, hosts, (hosts + 4) % 16, np.ones(16))
    assert Counter(shifted[tree.first_router_link :]) == {2.0: 16}


def test_ecmp_takes_every_common_switch_of_the_lowest_subtree_alike():
    tree = of_ports(CABLES, 4)
    assert Counter(flow(tree, ECMP, 0, 2).values()) == {1.0: 2, 0.5: 4}  # in one pod: its 2 switches
    assert Counter(flow(tree, ECMP, 0, 15).values()) == {1.0: 2, 0.5: 4, 0.25: 8}  # in another: 4 at the top


@pytest.mark.parametrize(
    ("down", "up", "said"),
    [
        ((), (), "a fat tree of 0 levels has 0 numbers of links up: give one fewer than levels"),
        ((4, 4), (4, 4), "a fat tree of 2 levels has 2 numbers of links up"),
        ((4, 0), (4,), "the number of links down of a fat tree's level 2 is 0: give a whole number, 1 or more"),
        ((4, 4), (-1,), "the number of links up of a fat tree's level 1 is -1"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(down, up, said):
    with pytest.raises(UsageError, match=said):
        FatTree(CABLES, down, up)


def test_ports_that_cannot_be_divided_are_refused():
    with pytest.raises(UsageError, match="switches of 5 ports .* 1 to 1: give a multiple of 2, such as 4"):
        of_ports(CABLES, 5)
    with pytest.raises(UsageError, match="switches of 16 ports .* 2 to 1: give a multiple of 6, such as 18"):
        of_ports(CABLES, 16, oversubscription=2)
    with pytest.raises(UsageError, match="the oversubscription of a fat tree is 0"):
        of_ports(CABLES, 16, oversubscription=0)
