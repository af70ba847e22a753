"""Slim Fly, for every prime power up to 32: counts, degree, diameter, and ways by arithmetic."""

from __future__ import annotations

from math import ceil

import numpy as np
import pytest
from known_networks import CABLES, PRIME_POWERS
from ways import hops

from samestep.errors import UsageError
from samestep.network.routing import MINIMAL
from samestep.network.topologies.slim_fly import SlimFly


def adjacency(fly):
    """From the definition of neighbours alone."""
    table = np.zeros((fly.routers, fly.routers), dtype=np.float32)
    for router in range(fly.routers):
        table[router, fly.adjacent(router)] = 1
    return table


@pytest.mark.parametrize("q", PRIME_POWERS)
def test_it_is_an_mms_graph(q):
    fly = SlimFly(CABLES, q, p=1)
    (delta,) = {delta for delta in (-1, 0, 1) if (q - delta) % 4 == 0}
    table = adjacency(fly)
    assert (fly.delta, fly.routers, fly.degree) == (delta, 2 * q * q, (3 * q - delta) // 2)
    assert set(table.sum(axis=0)) == set(table.sum(axis=1)) == {fly.degree}
    assert (table == table.T).all()
    assert not table.diagonal().any()
    within_two = table + table @ table > 0
    assert within_two.all()
    assert not (table + np.eye(len(table)) > 0).all()  # two, and not one


@pytest.mark.parametrize("q", PRIME_POWERS)
def test_its_generators_are_their_own_negatives_and_as_many_as_they_must_be(q):
    fly = SlimFly(CABLES, q)
    for steps in fly.generators:
        assert len(set(steps)) == len(steps) == (q - fly.delta) // 2
        assert set(fly.field.neg[steps]) == set(steps)
    assert {*fly.generators[0], *fly.generators[1]} == set(range(1, q))


@pytest.mark.parametrize("q", [3, 4, 5, 7, 8, 9])
def test_its_links_are_those_of_the_definition(q):
    fly = SlimFly(CABLES, q, p=1)
    field, found = fly.field, set()
    places = [(half, a, b) for half in (0, 1) for a in range(q) for b in range(q)]
    for one, (half, a, b) in enumerate(places):
        for other, (beyond, c, d) in enumerate(places):
            if half == beyond:
                joined = a == c and field.sub[b, d] in fly.generators[half]
            else:
                (x, y), (m, line) = ((a, b), (c, d)) if half == 0 else ((c, d), (a, b))
                joined = y == field.add[field.mul[m, x], line]
            if joined:
                found.add((one, other))
    assert found == {(one, other) for one in range(fly.routers) for other in fly.adjacent(one)}


def test_q_5_is_the_hoffman_singleton_graph():
    """The only graph of 50 vertices of degree 7 without triangles or squares."""
    table = adjacency(SlimFly(CABLES, 5, p=1))
    common = table @ table
    assert (common[table > 0] == 0).all()
    assert (common[(table == 0) & ~np.eye(50, dtype=bool)] == 1).all()


@pytest.mark.parametrize("q", PRIME_POWERS)
def test_the_way_is_the_shortest_between_any_two(q):
    fly = SlimFly(CABLES, q, p=1)
    table = adjacency(fly)
    draw = np.random.default_rng(q)
    pairs = draw.integers(0, fly.hosts, (2, 2000)) if fly.hosts > 60 else np.indices((fly.hosts,) * 2).reshape(2, -1)
    sources, targets = pairs[:, pairs[0] != pairs[1]]
    at, taken = sources.copy(), np.zeros(len(sources), dtype=int)
    for hop in hops(fly, MINIMAL, sources, targets):
        inside = hop.links >= fly.first_router_link
        for message, link in zip(hop.messages[inside], hop.links[inside], strict=True):
            tail, head = fly.ends(int(link))
            assert tail - fly.hosts == at[message]
            assert table[tail - fly.hosts, head - fly.hosts]
            at[message] = head - fly.hosts
            taken[message] += 1
    assert (at == targets).all()
    assert (taken == np.where(table[sources, targets] > 0, 1, 2)).all()


@pytest.mark.parametrize(("q", "hosts"), [(3, 54), (5, 200), (7, 588), (11, 2178), (17, 7514), (32, 49152)])
def test_half_as_many_hosts_as_links_stand_on_a_switch(q, hosts):
    fly = SlimFly(CABLES, q)
    assert fly.hosts_per_router == ceil(fly.degree / 2)
    assert fly.hosts == hosts


@pytest.mark.parametrize(
    ("q", "said"),
    [
        (6, "there is no Slim Fly of q = 6: give a prime power, such as 5 or 7"),
        (12, "such as 11 or 13"),
        (28, "such as 27 or 29"),
        (2, "q of a Slim Fly is 2: give a whole number, 3 to 128"),
        (-5, "is -5: give a whole number, 3 to 128"),
        (131, "is 131: give a whole number, 3 to 128"),
        (5.0, "is 5.0: give a whole number"),
    ],
)
def test_other_q_are_refused_and_the_next_named(q, said):
    with pytest.raises(UsageError, match=said):
        SlimFly(CABLES, q)


def test_fewer_than_one_host_is_refused():
    with pytest.raises(UsageError, match="p, the hosts on a Slim Fly's switch, is -1: give a whole number, 0 or more"):
        SlimFly(CABLES, 5, p=-1)
