"""Dragonfly: groups that are complete, one cable from each to every other, and the way over it."""

from __future__ import annotations

from collections import Counter, deque

import pytest
from known_networks import CABLES, distances, neighbours, vertices
from ways import flow, path

from samestep.errors import UsageError
from samestep.network.routing import ECMP, MINIMAL
from samestep.network.topologies.dragonfly import Dragonfly, balanced

SHAPES = [(1, 2, 1, 0), (2, 4, 2, 0), (1, 3, 2, 0), (2, 4, 2, 5), (1, 1, 3, 0), (1, 6, 1, 4)]


@pytest.mark.parametrize("shape", SHAPES)
def test_groups_are_complete_and_joined_by_one_cable_each(shape):
    fly = Dragonfly(CABLES, *shape)
    near, far = Counter(), Counter()
    for link in range(fly.first_router_link, fly.links):
        tail, head = (vertex - fly.hosts for vertex in fly.ends(link))
        if tail // fly.a == head // fly.a:
            near[tail, head] += 1
        else:
            far[tail // fly.a, head // fly.a] += 1
    groups = range(fly.groups)
    assert far == {(one, other): 1 for one in groups for other in groups if one != other}
    assert len(near) == fly.routers * (fly.a - 1)


@pytest.mark.parametrize("h", [1, 2, 3])
def test_the_balanced_one_has_its_counts_and_radix(h):
    fly = balanced(CABLES, h)
    assert (fly.p, fly.a, fly.h, fly.groups) == (h, 2 * h, h, 2 * h * h + 1)
    assert fly.hosts == 4 * h**4 + 2 * h**2
    assert fly.routers == fly.a * fly.groups
    radix = {len(neighbours(fly, vertex)) for vertex in vertices(fly)[fly.hosts :]}
    assert radix == {fly.p + fly.h + fly.a - 1}
    assert fly.links == 2 * fly.hosts + fly.routers * (fly.a - 1 + fly.h)


@pytest.mark.parametrize("h", [2, 3])
def test_the_diameter_is_three_hops_and_two_ports(h):
    fly = balanced(CABLES, h)
    assert fly.diameter == 3
    assert max(distances(fly, 0)[host] for host in range(fly.hosts)) == 5


def nearest_by_one_cable(fly, source):
    """Links to every host by ways that leave a group once at most, by breadth-first search."""
    found, queue = {(source, 0): 0}, deque([(source, 0)])
    while queue:
        vertex, left = queue.popleft()
        for each in neighbours(fly, vertex):
            switches = min(vertex, each) >= fly.hosts
            now = left + (switches and (vertex - fly.hosts) // fly.a != (each - fly.hosts) // fly.a)
            if now <= 1 and (each, now) not in found:
                found[each, now] = found[vertex, left] + 1
                queue.append((each, now))
    return [min(found.get((host, left), 99) for left in (0, 1)) for host in range(fly.hosts)]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_way_is_the_shortest_of_one_cable_between_groups(shape):
    fly = Dragonfly(CABLES, *shape)
    for source in range(0, fly.hosts, 3):
        nearest = nearest_by_one_cable(fly, source)
        assert [len(path(fly, MINIMAL, source, host)) - 1 for host in range(fly.hosts)] == nearest


def test_few_switches_are_nearer_by_two_cables():
    fly = balanced(CABLES, 2)
    source, found = fly.p, distances(fly, fly.p)  # on the second switch of a group
    nearer = [host for host in range(fly.hosts) if found[host] < len(path(fly, MINIMAL, source, host)) - 1]
    assert 0 < len(nearer) < fly.hosts / 10


def test_the_shortest_way_is_the_only_one():
    fly = balanced(CABLES, 2)
    assert set(flow(fly, ECMP, 0, 71).values()) == {1.0}


def test_what_does_not_fit_is_refused():
    with pytest.raises(
        UsageError, match="4 switches with 2 cables each reach 8 other groups, not 9: give at most 9 groups"
    ):
        Dragonfly(CABLES, 2, 4, 2, 10)
    with pytest.raises(
        UsageError, match="a, the switches in a dragonfly's group, is 0: give a whole number, 1 or more"
    ):
        Dragonfly(CABLES, 2, 0, 2)
    with pytest.raises(UsageError, match="p, the hosts on a dragonfly's switch, is -2"):
        Dragonfly(CABLES, -2, 4, 2)
    with pytest.raises(UsageError, match="h, the cables of a dragonfly's switch to other groups, is 1.5"):
        Dragonfly(CABLES, 2, 4, 1.5)
