"""Rings and tori: the grid, and arcs against hops."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from known_networks import CABLES, neighbours
from ways import flow, hops

from samestep.errors import UsageError
from samestep.network.routing import ECMP, MINIMAL
from samestep.network.topologies.topology import Segments, Topology
from samestep.network.topologies.torus import Torus, ring

dims = st.one_of(
    st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple),
    st.lists(st.integers(1, 3), min_size=4, max_size=4).map(tuple),
)
few = settings(deadline=None, max_examples=40)


@few
@given(dims)
def test_the_links_are_those_of_the_periodic_grid(dims):
    torus = Torus(CABLES, dims)
    places = {here: host for host, here in enumerate(np.ndindex(*dims))}
    joined = {
        (one, other)
        for here, one in places.items()
        for dim, size in enumerate(dims)
        for step in (1, -1)
        if (other := places[(*here[:dim], (here[dim] + step) % size, *here[dim + 1 :])]) != one
    }
    assert {torus.ends(link) for link in range(torus.links)} == joined
    assert len(joined) == torus.links
    assert torus.hosts == prod(dims)
    assert torus.diameter == sum(size // 2 for size in dims)


def test_a_three_dimensional_torus_has_six_links_a_host():
    torus = Torus(CABLES, (3, 4, 5))
    assert {len(neighbours(torus, host)) for host in range(60)} == {6}
    assert torus.links == 360


def test_twice_a_cross_section_halves_a_torus():
    torus = Torus(CABLES, (6, 4, 3))
    cut = [(tail < 36) != (head < 36) for tail, head in map(torus.ends, range(torus.links))]
    assert sum(cut) == 2 * 2 * 72 // 6  # both ways, 2 N / largest dimension


@few
@given(dims, st.booleans(), st.data())
def test_arcs_are_counted_as_hop_by_hop(dims, split, data):
    torus = Torus(CABLES, dims)
    pairs = st.tuples(st.integers(0, torus.hosts - 1), st.integers(0, torus.hosts - 1), st.integers(0, 8))
    messages = np.array(data.draw(st.lists(pairs, min_size=1, max_size=20)))
    ways, nbytes = Segments(messages[:, 0], messages[:, 1], messages[:, 1]), messages[:, 2] * 48.0  # by 3! and 2^4
    by_arc = torus.link_loads(ways, nbytes, split=split)
    by_hop = Topology.link_loads(torus, ways, nbytes, split=split)
    assert by_arc[0] == pytest.approx(by_hop[0], abs=1e-9)
    assert by_arc[1] == pytest.approx(by_hop[1], abs=1e-9)
    if not split:
        assert (by_arc[0] == by_hop[0]).all()


def test_dimension_order_goes_the_shorter_way_round_and_forward_where_both_are():
    torus = Torus(CABLES, (4, 5))
    walked = [
        torus.ends(int(link)) for hop in hops(torus, MINIMAL, np.array([0]), np.array([13])) for link in hop.links
    ]
    assert walked == [(0, 4), (4, 3), (3, 8), (8, 13)]


def test_a_message_half_way_round_is_split_both_ways():
    network = ring(CABLES, 6)
    split = {network.ends(link): share for link, share in flow(network, ECMP, 0, 3).items()}
    assert split == {(0, 1): 0.5, (1, 2): 0.5, (2, 3): 0.5, (0, 5): 0.5, (5, 4): 0.5, (4, 3): 0.5}


def test_a_message_is_split_over_the_orders_of_the_dimensions():
    network = Torus(CABLES, (3, 3))
    split = {network.ends(link): share for link, share in flow(network, ECMP, 0, 4).items()}
    assert split == {(0, 1): 0.5, (1, 4): 0.5, (0, 3): 0.5, (3, 4): 0.5}


def test_numbers_that_do_not_fit_are_refused():
    with pytest.raises(UsageError, match=r"a torus of 0 dimensions has no hosts: give the hosts in each"):
        Torus(CABLES, ())
    with pytest.raises(UsageError, match="dimension 1 of a torus is 0: give a whole number, 1 or more"):
        Torus(CABLES, (4, 0))
    with pytest.raises(UsageError, match="dimension 0 of a torus is -3"):
        ring(CABLES, -3)
