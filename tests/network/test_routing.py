"""Ways from host to host: each is a path of links that exist, the minimal ones are shortest, and nothing is lost."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from known_networks import NETWORKS, distances, links_of, named, neighbours
from ways import flow, path

from samestep.errors import UsageError
from samestep.network.routing import ECMP, MINIMAL, valiant
from samestep.network.topologies.dragonfly import Dragonfly
from samestep.network.topologies.fat_tree import FatTree
from samestep.network.topologies.topology import Switch

LINKS = {network: set(links_of(network)) for network in NETWORKS}
few = settings(deadline=None, max_examples=60)


@st.composite
def ways(draw):
    """A network and two of its hosts."""
    network = draw(st.sampled_from(NETWORKS))
    return network, draw(st.integers(0, network.hosts - 1)), draw(st.integers(0, network.hosts - 1))


routings = st.one_of(
    st.just(MINIMAL), st.just(ECMP), st.builds(valiant, st.integers(0, 9)), st.builds(valiant, st.just(1), st.just(3))
)


@few
@given(ways(), st.one_of(st.just(MINIMAL), st.builds(valiant, st.integers(0, 9))))
def test_a_path_leads_from_link_to_link(way, routing):
    network, source, target = way
    passed = path(network, routing, source, target)
    assert (passed[0], passed[-1]) == (source, target)
    assert LINKS[network].issuperset(pairwise(passed))


@few
@given(ways())
def test_the_minimal_path_is_as_long_as_by_breadth_first_search(way):
    network, source, target = way
    if isinstance(network, Dragonfly):  # shortest of those with one cable between groups: test_dragonfly.py
        return
    assert len(path(network, MINIMAL, source, target)) - 1 == distances(network, source)[target]


@few
@given(ways(), routings)
def test_what_flows_into_a_vertex_flows_out_of_it(way, routing):
    network, source, target = way
    surplus = defaultdict(float)
    for link, share in flow(network, routing, source, target).items():
        assert share > 0
        tail, head = network.ends(link)
        surplus[tail] += share
        surplus[head] -= share
    if source != target:
        assert surplus.pop(source) == pytest.approx(1)
        assert surplus.pop(target) == pytest.approx(-1)
    assert list(surplus.values()) == pytest.approx([0] * len(surplus))


@few
@given(ways())
def test_what_is_split_goes_by_shortest_ways_only(way):
    network, source, target = way
    hops = sum(flow(network, ECMP, source, target).values())
    assert hops == pytest.approx(len(path(network, MINIMAL, source, target)) - 1)


@few
@given(ways())
def test_the_minimal_path_is_one_of_those_that_are_split_over(way):
    network, source, target = way
    split = flow(network, ECMP, source, target)
    assert set(flow(network, MINIMAL, source, target)) <= set(split)


def equally_short(network, source, target):
    """Every shortest path, by breadth-first search."""
    found, paths = distances(network, target), [[source]]
    while paths[0][-1] != target:
        paths = [[*p, each] for p in paths for each in neighbours(network, p[-1]) if found[each] == found[p[-1]] - 1]
    return paths


@pytest.mark.parametrize(
    "network", [each for each in NETWORKS if not each.hosts_are_routers and not isinstance(each, Dragonfly)], ids=named
)
def test_a_message_is_split_evenly_over_all_shortest_paths(network):
    for source, target in [(0, network.hosts - 1), (0, network.hosts // 2), (network.hosts // 3, network.hosts - 1)]:
        if source == target:
            continue
        expected = defaultdict(float)
        paths = equally_short(network, source, target)
        for one in paths:
            for link in pairwise(one):
                expected[link] += 1 / len(paths)
        got = {network.ends(link): share for link, share in flow(network, ECMP, source, target).items()}
        assert got == pytest.approx(dict(expected))


def test_the_random_switch_depends_on_the_seed_and_the_pair_alone():
    network = next(each for each in NETWORKS if each.name == "Slim Fly q=7 p=2")
    ways = [path(network, valiant(seed), 0, 100) for seed in range(20)]
    assert ways == [path(network, valiant(seed), 0, 100) for seed in range(20)]
    assert len({tuple(way) for way in ways}) > 10


@pytest.mark.parametrize("network", NETWORKS, ids=named)
def test_a_detour_is_at_most_two_diameters(network):
    ports = 0 if network.hosts_are_routers else 2
    straight = isinstance(network, FatTree | Switch)  # by a random top switch, which is no longer
    longest = max(len(path(network, valiant(3), 0, host)) - 1 for host in range(network.hosts))
    assert longest <= ports + network.diameter * (1 if straight else 2)


def test_no_parts_are_refused():
    with pytest.raises(UsageError, match="a message cannot be cut into 0 parts: give 1 or more"):
        valiant(parts=0)
