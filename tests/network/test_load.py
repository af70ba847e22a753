"""The bytes on every link of a round, against messages followed one by one."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from known_networks import CABLES, NETWORKS

from samestep.network.load import load
from samestep.network.routing import ECMP, MINIMAL, flow, valiant
from samestep.network.topologies.fat_tree import leaf_spine
from samestep.network.topologies.slim_fly import SlimFly
from samestep.network.topologies.torus import ring

few = settings(deadline=None, max_examples=60)


@st.composite
def rounds(draw):
    """A network with two hosts or more, and messages between them."""
    network = draw(st.sampled_from([network for network in NETWORKS if network.hosts > 1]))
    host = st.integers(0, network.hosts - 1)
    message = st.tuples(host, host, st.integers(0, 1000)).filter(lambda each: each[0] != each[1])
    return network, np.array(draw(st.lists(message, min_size=1, max_size=30)))


def loaded(network, routing, messages):
    return load(network, routing, messages[:, 0], messages[:, 1], messages[:, 2].astype(float))


@few
@given(rounds(), st.sampled_from([MINIMAL, ECMP, valiant(1), valiant(2, parts=3)]))
def test_the_load_is_that_of_every_message_by_itself(case, routing):
    network, messages = case
    expected = np.zeros(network.links)
    for number, (source, target, nbytes) in enumerate(messages):
        latency = 0
        for link, share in flow(network, routing, int(source), int(target)).items():
            expected[link] += nbytes * share
            latency += network.latencies[link] * share
        assert loaded(network, routing, messages).latencies[number] == pytest.approx(latency)
    assert loaded(network, routing, messages).nbytes == pytest.approx(expected)


@few
@given(rounds())
def test_loads_add_up_to_bytes_times_hops_exactly(case):
    network, messages = case
    hops = [len(flow(network, MINIMAL, int(source), int(target))) for source, target, _ in messages]
    assert loaded(network, MINIMAL, messages).nbytes.sum() == sum(messages[:, 2] * hops)


@few
@given(rounds(), st.sampled_from([MINIMAL, ECMP, valiant(1)]))
def test_the_busiest_link_is_the_slowest(case, routing):
    network, messages = case
    one = loaded(network, routing, messages)
    if one.busiest is None:
        assert not messages[:, 2].any()
        return
    times = defaultdict(float)
    for link, nbytes in enumerate(one.nbytes):
        times[link] = nbytes / network.bandwidths[link]
    assert one.transfer_s == max(times.values()) == times[one.busiest]
    assert one.seconds == one.latency_s + one.transfer_s


def test_two_messages_over_one_cable_take_twice_as_long():
    tree = leaf_spine(CABLES, leaves=2, hosts=2, spines=1)
    one = loaded(tree, MINIMAL, np.array([(0, 2, 6), (1, 3, 6)]))
    leaf, spine, other = 4, 6, 5
    assert one.by_link() == {
        (0, leaf): 6,
        (1, leaf): 6,
        (leaf, spine): 12,
        (spine, other): 12,
        (other, 2): 6,
        (other, 3): 6,
    }
    assert one.transfer_s == 12 / CABLES.between.bytes_per_s
    assert one.latency_s == 2 * CABLES.port.latency_s + 2 * CABLES.between.latency_s
    assert tree.ends(one.busiest) in {(leaf, spine), (spine, other)}


def test_ways_that_do_not_meet_do_not_wait():
    one = loaded(ring(CABLES, 6), MINIMAL, np.array([(host, (host + 1) % 6, 8) for host in range(6)]))
    assert (one.transfer_s, one.latency_s) == (8 / 2, 1)


def test_a_round_of_nothing_takes_no_time():
    nothing = loaded(ring(CABLES, 6), MINIMAL, np.zeros((0, 3), dtype=int))
    assert (nothing.busiest, nothing.seconds, nothing.by_link()) == (None, 0, {})


@pytest.mark.parametrize("q", [5, 9])
def test_a_detour_evens_out_what_all_send_to_the_same_neighbour(q):
    """All hosts of a switch send to those of one switch next to it: one link for all, or two ways for each."""
    fly = SlimFly(CABLES, q)
    each = fly.concentration
    pairs = [
        (router * each + host, fly.adjacent(router)[0] * each + host)
        for router in range(fly.routers)
        for host in range(each)
    ]
    messages = np.array([(source, target, 1) for source, target in pairs])
    straight, round_about = (loaded(fly, routing, messages).transfer_s for routing in (MINIMAL, valiant(0, parts=64)))
    assert straight == each / CABLES.between.bytes_per_s
    assert round_about < straight
