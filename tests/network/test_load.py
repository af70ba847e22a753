"""The bytes on every link of a round, against messages followed one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from known_networks import CABLES, NETWORKS
from ways import flow

from samestep.network.routing import ECMP, MINIMAL, link_loads, valiant
from samestep.network.topologies.slim_fly import SlimFly

few = settings(deadline=None, max_examples=60)


@st.composite
def rounds(draw):
    """A network with two hosts or more, and messages between them."""
    network = draw(st.sampled_from([network for network in NETWORKS if network.hosts > 1]))
    host = st.integers(0, network.hosts - 1)
    message = st.tuples(host, host, st.integers(0, 1000)).filter(lambda each: each[0] != each[1])
    return network, np.array(draw(st.lists(message, min_size=1, max_size=30)))


def loaded(network, routing, messages):
    return link_loads(network, routing, messages[:, 0], messages[:, 1], messages[:, 2].astype(float))


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
        assert loaded(network, routing, messages)[1][number] == pytest.approx(latency)
    assert loaded(network, routing, messages)[0] == pytest.approx(expected)


@few
@given(rounds())
def test_loads_add_up_to_bytes_times_hops_exactly(case):
    network, messages = case
    hops = [len(flow(network, MINIMAL, int(source), int(target))) for source, target, _ in messages]
    assert loaded(network, MINIMAL, messages)[0].sum() == sum(messages[:, 2] * hops)


@pytest.mark.parametrize("q", [5, 9])
def test_a_detour_evens_out_what_all_send_to_the_same_neighbour(q):
    """All hosts of a switch send to those of one switch next to it: one link for all, or two ways for each."""
    fly = SlimFly(CABLES, q)
    each = fly.hosts_per_router
    pairs = [
        (router * each + host, fly.adjacent(router)[0] * each + host)
        for router in range(fly.routers)
        for host in range(each)
    ]
    messages = np.array([(source, target, 1) for source, target in pairs])
    straight, round_about = (
        (loaded(fly, routing, messages)[0] / fly.bandwidths).max() for routing in (MINIMAL, valiant(0, parts=64))
    )
    assert straight == each / CABLES.router.bytes_per_s
    assert round_about < straight
