"""What rounds cost on networks: what they cost at a switch where nothing is shared, known figures where much is."""

from __future__ import annotations

import numpy as np
import pytest

import closed_forms
from samestep.collectives import doubling, halving, hierarchical, ring, segmented, server, tree
from samestep.errors import UsageError
from samestep.network import placement, pricing
from samestep.network.links import Link, Links
from samestep.network.messages import AllToAll, remap, send
from samestep.network.pricing import PlacedNetwork, contended_price, price
from samestep.network.routing import MINIMAL
from samestep.network.topologies.dragonfly import balanced
from samestep.network.topologies.fat_tree import leaf_spine
from samestep.network.topologies.slim_fly import SlimFly
from samestep.network.topologies.topology import LinkTypes, Switch
from samestep.network.topologies.torus import Torus
from samestep.network.topologies.torus import ring as ring_network

TYPES = LinkTypes(Link(2.0**-20, 2.0**30))  # powers of two: sums are exact
N = 2.0**24
PLANS = {
    "ring": (ring.all_reduce, closed_forms.ring),
    "halving and doubling": (halving.all_reduce, closed_forms.halving_doubling),
    "binomial tree": (tree.all_reduce, closed_forms.binomial_tree),
    "recursive doubling": (doubling.all_reduce, closed_forms.recursive_doubling),
    "segmented ring": (
        segmented.all_reduce,
        lambda ranks, nbytes, links: closed_forms.segmented_ring(ranks, nbytes, links, 2),
    ),
}
every_plan = pytest.mark.parametrize(("plan", "formula"), PLANS.values(), ids=PLANS)


@every_plan
@pytest.mark.parametrize("ranks", [2, 4, 8, 16, 64])
def test_on_a_switch_rounds_cost_what_the_formula_says(plan, formula, ranks):
    network = Switch(TYPES, ranks)
    links = Links(Link(2 * TYPES.router.latency_s, TYPES.router.bytes_per_s))  # two ports
    got = contended_price(plan(ranks), N, network, placement.linear(network, ranks))
    assert got.seconds == formula(ranks, N, links)
    assert got.contention == 1


@pytest.mark.parametrize("choice", [placement.linear, placement.random])
def test_ranks_of_one_host_share_its_port_as_they_share_a_nic(choice):
    inside, between = Link(2.0**-22, 2.0**33), Link(2.0**-20, 2.0**30)
    port = Link(between.latency_s / 2, between.bytes_per_s)
    network = Switch(LinkTypes(Link(0, 2.0**40), host_port=port, intra_host=inside, ranks_per_host=4), 8)
    plan = hierarchical.all_reduce(32, 4, ring.all_reduce)
    expected = price(plan, N, Links(inside, between, local=4)).seconds
    assert contended_price(plan, N, network, choice(network, 32)).seconds == expected


@every_plan
def test_overhead_is_paid_once_a_message(plan, formula):
    slow = LinkTypes(TYPES.router, overhead_s=1.0)
    quick, late = (
        contended_price(plan(8), N, net, placement.linear(net, 8)) for net in (Switch(TYPES, 8), Switch(slow, 8))
    )
    assert late.price.latency_s - quick.price.latency_s == late.rounds


def placed(network, ranks, choice=placement.linear, routing=MINIMAL):
    return PlacedNetwork(network, choice(network, ranks), routing)


def test_rounds_of_their_own_sizes_are_priced_one_by_one():
    rounds = [send([0, 1], [1, 2]), send([3], [0], width=2)]
    found = placed(Torus(TYPES, (4, 5)), 4).price(rounds, N)
    assert found.rounds == 2
    assert found.price.transfer_s == 3 * N / TYPES.router.bytes_per_s
    assert found.price.latency_s == 3 * TYPES.router.latency_s


def test_sizes_scale_the_transfer_and_leave_the_latency():
    network = SlimFly(TYPES, 5)
    at = placement.random(network, 128, seed=4)
    one, four = (contended_price(halving.all_reduce(128), n, network, at).price for n in (N, 4 * N))
    assert four.transfer_s == pytest.approx(4 * one.transfer_s)
    assert four.latency_s == one.latency_s


def test_the_snake_makes_a_ring_free_on_a_torus():
    network = Torus(TYPES, (5, 7))
    snake, linear = (
        contended_price(ring.all_reduce(35), N, network, choice(network, 35))
        for choice in (placement.circuit, placement.linear)
    )
    assert snake.contention == pytest.approx(1)
    assert snake.price.latency_s == 2 * 34 * TYPES.router.latency_s
    assert linear.price.latency_s == 2 * 34 * 2 * TYPES.router.latency_s  # where a row ends, on and down


def test_halving_and_doubling_on_a_ring_of_hosts_shares_links():
    """Partners 1, 2, 4 away load a link of the ring so often, for 1/2, 1/4, 1/8 of the bytes, twice: 2 x 3/2."""
    network = ring_network(TYPES, 8)
    got = contended_price(halving.all_reduce(8), N, network, placement.linear(network, 8))
    assert got.price.transfer_s == 3 * N / TYPES.router.bytes_per_s


@pytest.mark.parametrize(("spines", "contention"), [(16, 1), (8, 1.0588), (4, 1.1765)])
def test_oversubscription_is_felt_where_halving_crosses_leaves(spines, contention):
    network = leaf_spine(TYPES, leaves=16, hosts=16, spines=spines)
    at = placement.linear(network, 256)
    assert contended_price(halving.all_reduce(256), N, network, at).contention == pytest.approx(contention, abs=1e-4)
    assert contended_price(ring.all_reduce(256), N, network, at).contention == pytest.approx(1)


@pytest.mark.parametrize("network", [SlimFly(TYPES, 5), SlimFly(TYPES, 7), balanced(TYPES, 2)], ids=lambda n: n.name)
def test_a_circuit_makes_a_ring_free_where_a_random_order_makes_it_slow(network):
    ranks = network.hosts
    along, drawn = (
        contended_price(ring.all_reduce(ranks), N, network, choice(network, ranks))
        for choice in (placement.circuit, placement.random)
    )
    assert along.contention == pytest.approx(1)
    assert along.price.latency_s == 2 * (ranks - 1) * 3 * TYPES.router.latency_s  # port, link, port
    assert drawn.contention >= 3


def test_the_busiest_link_is_named():
    network = leaf_spine(TYPES, leaves=2, hosts=2, spines=1)
    got = placed(network, 4).price([send([0, 1], [2, 3])], N)
    assert got.busiest in {(4, 6), (6, 5)}
    assert got.contention == 2
    assert str(got).startswith("31.3 ms in 1 round: latency 3.81 µs, transfer 31.2 ms, 2.00 times")


def test_no_rounds_cost_nothing():
    network = Switch(TYPES, 1)
    for plan in (ring.all_reduce(1), halving.all_reduce(1), tree.all_reduce(1), server.all_reduce(1)):
        nothing = contended_price(plan, N, network, placement.linear(network, 1))
        assert (nothing.seconds, nothing.contention, nothing.busiest) == (0, 1, None)


@every_plan
@pytest.mark.parametrize(
    "network",
    [Torus(TYPES, (16, 16, 16)), leaf_spine(TYPES, 64, 64, 32), balanced(TYPES, 6)],
    ids=lambda n: n.name,
)
def test_thousands_of_ranks_cost_no_less_than_at_a_switch(network, plan, formula):
    got = contended_price(plan(4096), N, network, placement.linear(network, 4096))
    assert got.seconds >= formula(4096, N, Links(TYPES.router)) * 0.9
    rings = {ring.all_reduce: 8190, segmented.all_reduce: 16380, doubling.all_reduce: 12}
    assert got.rounds == rings.get(plan, 24)


def test_a_rank_that_is_not_placed_is_refused():
    network = placed(Switch(TYPES, 4), 4)
    with pytest.raises(UsageError, match="a message of rank 4, but only 4 ranks are placed: place as many"):
        network.price([send([0], [4])], N)
    with pytest.raises(UsageError, match="a message of rank -1, but only 4 ranks"):
        network.price([send([0, -1], [1, 2])], N)


def exchange(ranks):
    return AllToAll(np.arange(ranks)[None], np.zeros(1, dtype=np.int64), 1, adds=False)


@pytest.mark.parametrize("choice", [placement.linear, placement.random])
def test_an_all_to_all_of_which_some_is_counted_is_not_too_short(monkeypatch, choice):
    network = SlimFly(TYPES, 5)
    whole = placed(network, 200, choice).price([exchange(200)], 1e6)
    assert whole.price == placed(network, 200, choice).price([exchange(200).expanded()], 1e6).price
    monkeypatch.setattr(pricing, "_MOST", 0)
    some = placed(network, 200, choice).price([exchange(200)], 1e6)
    assert 0.95 * whole.price.transfer_s <= some.price.transfer_s <= 2.5 * whole.price.transfer_s
    assert some.price.latency_s == whole.price.latency_s


def test_groups_side_by_side_exchange_within_themselves():
    alone = placed(Switch(TYPES, 12), 4).price([exchange(4)], 1.0)
    members = np.arange(12).reshape(4, 3).T
    beside = placed(Switch(TYPES, 12), 12).price(remap([exchange(4)], members), 1.0)
    assert beside.price == alone.price
