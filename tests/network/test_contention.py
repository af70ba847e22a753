"""What rounds cost on networks: against formulas where nothing is in the way, against known figures where much is."""

from __future__ import annotations

from collections import Counter
from functools import partial

import numpy as np
import pytest

from samestep.collectives import doubling, halving, hierarchical, segmented, server, tree
from samestep.collectives import ring as ring_plans
from samestep.collectives import torus as torus_plans
from samestep.errors import UsageError
from samestep.network import cost, formulas, placement, rounds
from samestep.network.contention import contended_price
from samestep.network.links import Link, Links
from samestep.network.rounds import Round, Shift
from samestep.network.routing import ECMP, MINIMAL, valiant
from samestep.network.topologies.cables import Cables
from samestep.network.topologies.dragonfly import balanced
from samestep.network.topologies.fat_tree import leaf_spine
from samestep.network.topologies.slim_fly import SlimFly
from samestep.network.topologies.switch import Switch
from samestep.network.topologies.torus import Torus
from samestep.network.topologies.torus import ring as ring_network

CABLES = Cables(Link(2.0**-20, 2.0**30))  # powers of two: sums are exact
N = 2.0**24
PATTERNS = {
    "ring": (rounds.ring, ring_plans.all_reduce, formulas.ring),
    "halving and doubling": (rounds.halving_doubling, halving.all_reduce, formulas.halving_doubling),
    "binomial tree": (rounds.binomial_tree, tree.all_reduce, formulas.binomial_tree),
    "recursive doubling": (rounds.recursive_doubling, doubling.all_reduce, formulas.recursive_doubling),
    "segmented ring": (rounds.segmented_ring, segmented.all_reduce, partial(formulas.segmented_ring, segments=2)),
}
every_pattern = pytest.mark.parametrize(("pattern", "plan", "formula"), PATTERNS.values(), ids=PATTERNS)


def messages(one):
    one = one.round() if isinstance(one, Shift) else one
    sizes = one.nbytes.tolist()
    return Counter(dict.fromkeys(zip(one.sources.tolist(), one.targets.tolist(), sizes, strict=True), 1))


@every_pattern
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8, 12, 16, 21])
def test_the_rounds_are_those_of_the_plan(pattern, plan, formula, ranks):
    short = [messages(one) for one in pattern(ranks, 3.0 * ranks) for _ in range(one.times)]
    long = [messages(one) for one in rounds.of_plan(plan(ranks), 3.0 * ranks)]
    assert short == long


@every_pattern
@pytest.mark.parametrize("ranks", [2, 4, 8, 16, 64])
def test_on_a_switch_rounds_cost_what_the_formula_says(pattern, plan, formula, ranks):
    network = Switch(CABLES, ranks)
    links = Links(Link(2 * CABLES.between.latency_s, CABLES.between.bytes_per_s))  # two ports
    got = contended_price(pattern(ranks, N), network, placement.linear(network, ranks))
    assert got.seconds == formula(ranks, N, links)
    assert got.contention == 1


@pytest.mark.parametrize(("rows", "columns"), [(1, 4), (4, 1), (2, 3), (3, 4), (5, 5)])
def test_the_rounds_of_a_grid_are_those_of_a_torus_and_of_hosts(rows, columns):
    n = 3.0 * rows * columns
    short = [messages(one) for one in rounds.torus(rows, columns, n) for _ in range(one.times)]
    for plan in (torus_plans.all_reduce(rows, columns), hierarchical.all_reduce(rows * columns, columns)):
        assert short == [messages(one) for one in rounds.of_plan(plan, n)]


@pytest.mark.parametrize("ranks", [2, 3, 8, 13])
def test_the_rounds_of_one_server_are_those_of_the_plan(ranks):
    short = [messages(one) for one in rounds.parameter_server(ranks, 64.0)]
    assert short == [messages(one) for one in rounds.of_plan(server.all_reduce(ranks), 64.0)]


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_groups_of_every_so_manyth_rank_do_the_same_each_by_itself(stages):
    alone = [messages(one) for one in rounds.recursive_doubling(5, 40.0)]
    together = [messages(one) for one in rounds.apart(rounds.recursive_doubling(5, 40.0), stages)]
    for stage in range(stages):
        own = [
            Counter({(a // stages, b // stages, n): 1 for a, b, n in one if a % stages == b % stages == stage})
            for one in together
        ]
        assert own == alone


@pytest.mark.parametrize("choice", [placement.linear, placement.random])
def test_ranks_of_one_host_share_its_port_as_they_share_a_nic(choice):
    inside, between = Link(2.0**-22, 2.0**33), Link(2.0**-20, 2.0**30)
    cables = Cables(Link(0, 2.0**40), port=Link(between.latency_s / 2, between.bytes_per_s), inside=inside, local=4)
    network = Switch(cables, 8)
    plan = hierarchical.all_reduce(32, 4, ring_plans.all_reduce)
    expected = cost.price(plan, N, Links(inside, between, local=4)).seconds
    assert contended_price(rounds.of_plan(plan, N), network, choice(network, 32)).seconds == expected


@every_pattern
def test_overhead_is_paid_once_a_message(pattern, plan, formula):
    slow = Cables(CABLES.between, overhead_s=1.0)
    quick, late = (
        contended_price(pattern(8, N), net, placement.linear(net, 8)) for net in (Switch(CABLES, 8), Switch(slow, 8))
    )
    assert late.price.latency_s - quick.price.latency_s == late.rounds


NETWORKS = [Switch(CABLES, 60), ring_network(CABLES, 60), Torus(CABLES, (6, 10)), Torus(CABLES, (3, 4, 5))]


@pytest.mark.parametrize("network", NETWORKS, ids=lambda each: each.name)
def test_shifts_known_cost_what_shifts_counted_do(network):
    placed = placement.linear(network, 60)
    for distance in range(-3, 63):
        known = contended_price([Shift(60, distance, N, times=3)], network, placed)
        counted = contended_price([Shift(60, distance, N).round()] * 3, network, placed)
        assert known.price == counted.price
        assert known.rounds == counted.rounds


@pytest.mark.parametrize("routing", [MINIMAL, ECMP, valiant(1)], ids=lambda each: each.name)
def test_a_shift_that_is_not_known_is_counted(routing):
    network = Torus(CABLES, (4, 5))
    for placed in (placement.random(network, 20), placement.linear(network, 15)):
        by_rule = contended_price([Shift(placed.ranks, 7, N)], network, placed, routing)
        assert by_rule == contended_price([Shift(placed.ranks, 7, N).round()], network, placed, routing)


def test_rounds_may_be_plain_triples():
    network = Torus(CABLES, (4, 5))
    plain = contended_price([[(0, 1, N), (1, 2, N)], [(3, 0, 2 * N)]], network, placement.linear(network, 4))
    assert plain.rounds == 2
    assert plain.price.transfer_s == 3 * N / CABLES.between.bytes_per_s
    assert plain.price.latency_s == 3 * CABLES.between.latency_s


def test_sizes_scale_the_transfer_and_leave_the_latency():
    network = SlimFly(CABLES, 5)
    placed = placement.random(network, 128, seed=4)
    one, four = (contended_price(rounds.halving_doubling(128, n), network, placed).price for n in (N, 4 * N))
    assert four.transfer_s == pytest.approx(4 * one.transfer_s)
    assert four.latency_s == one.latency_s


def all_reduce(pattern, network, placed, routing=MINIMAL):
    return contended_price(pattern(placed.ranks, N), network, placed, routing)


def test_the_snake_makes_a_ring_free_on_a_torus():
    torus = Torus(CABLES, (5, 7))
    snake, linear = (
        all_reduce(rounds.ring, torus, choice(torus, 35)) for choice in (placement.circuit, placement.linear)
    )
    assert snake.contention == 1
    assert snake.price.latency_s == 2 * 34 * CABLES.between.latency_s
    assert linear.price.latency_s == 2 * 34 * 2 * CABLES.between.latency_s  # where a row ends, on and down


def test_halving_and_doubling_on_a_ring_of_hosts_shares_links():
    """Partners 1, 2, 4 away load a link of the ring so often, for 1/2, 1/4, 1/8 of the bytes, twice: 2 x 3/2."""
    network = ring_network(CABLES, 8)
    got = all_reduce(rounds.halving_doubling, network, placement.linear(network, 8))
    assert got.price.transfer_s == 3 * N / CABLES.between.bytes_per_s


@pytest.mark.parametrize(("spines", "contention"), [(16, 1), (8, 1.0588), (4, 1.1765)])
def test_oversubscription_is_felt_where_halving_crosses_leaves(spines, contention):
    network = leaf_spine(CABLES, leaves=16, hosts=16, spines=spines)
    got = all_reduce(rounds.halving_doubling, network, placement.linear(network, 256))
    assert got.contention == pytest.approx(contention, abs=1e-4)
    assert all_reduce(rounds.ring, network, placement.linear(network, 256)).contention == 1


@pytest.mark.parametrize("network", [SlimFly(CABLES, 5), SlimFly(CABLES, 7), balanced(CABLES, 2)], ids=lambda n: n.name)
def test_a_circuit_makes_a_ring_free_where_a_random_order_makes_it_slow(network):
    ranks = network.hosts
    along, drawn = (
        all_reduce(rounds.ring, network, choice(network, ranks)) for choice in (placement.circuit, placement.random)
    )
    assert along.contention == 1
    assert along.price.latency_s == 2 * (ranks - 1) * 3 * CABLES.between.latency_s  # port, link, port
    assert drawn.contention >= 3


def test_the_busiest_link_is_named():
    network = leaf_spine(CABLES, leaves=2, hosts=2, spines=1)
    got = contended_price([[(0, 2, N), (1, 3, N)]], network, placement.linear(network, 4))
    assert got.busiest in {(4, 6), (6, 5)}
    assert got.contention == 2
    assert str(got).startswith("31.3 ms in 1 round: latency 3.81 µs, transfer 31.2 ms, 2.00 times")


def test_no_rounds_cost_nothing():
    network = Switch(CABLES, 1)
    for none in ([], rounds.ring(1, N), rounds.halving_doubling(1, N), rounds.binomial_tree(1, N), [[]]):
        nothing = contended_price(none, network, placement.linear(network, 1))
        assert (nothing.seconds, nothing.contention, nothing.busiest) == (0, 1, None)


@every_pattern
@pytest.mark.parametrize(
    "network",
    [Torus(CABLES, (40, 50, 50)), leaf_spine(CABLES, 400, 250, 125), balanced(CABLES, 13)],
    ids=lambda n: n.name,
)
def test_a_hundred_thousand_ranks_can_be_priced(network, pattern, plan, formula):
    got = contended_price(pattern(100_000, N), network, placement.linear(network, 100_000))
    at_least = formula(100_000, N, Links(CABLES.between))
    assert got.seconds >= at_least * 0.9
    rings = {rounds.ring: 199_998, rounds.segmented_ring: 399_996, rounds.recursive_doubling: 18}
    assert got.rounds == rings.get(pattern, 34)


def test_messages_that_cannot_be_are_refused():
    network = Switch(CABLES, 4)
    placed = placement.linear(network, 4)
    with pytest.raises(UsageError, match="a message of rank 4, but only 4 ranks are placed: place as many"):
        contended_price([[(0, 4, N)]], network, placed)
    with pytest.raises(UsageError, match="a message of rank -1, but only 4 ranks"):
        contended_price([[(0, 1, N), (-1, 2, N)]], network, placed)
    with pytest.raises(UsageError, match="rank 2 sends to itself: leave the message out"):
        contended_price([[(0, 1, N), (2, 2, N)]], network, placed)
    with pytest.raises(UsageError, match="rank 0 sends -8.0 bytes: give 0 or more"):
        contended_price([[(0, 1, -8)]], network, placed)
    with pytest.raises(UsageError, match="rank 0 sends nan bytes"):
        Round(np.array([0]), np.array([1]), np.array([np.nan]))
    for pattern in (rounds.ring, rounds.halving_doubling, rounds.binomial_tree):
        with pytest.raises(UsageError, match="a collective over 0 ranks: give 1 or more"):
            list(pattern(0, N))
