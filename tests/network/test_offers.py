"""What clusters offer: on one switch the prices of the plans, on networks what contention says."""

from __future__ import annotations

import math
import resource
import time

import pytest

from samestep.collectives import double_tree as double_tree_plans
from samestep.collectives.choose import CANDIDATES
from samestep.errors import UsageError
from samestep.network import cost, formulas, rounds
from samestep.network.cluster import parse
from samestep.network.contention import contended_price
from samestep.network.offers import CHUNKS, Term, best, offers
from samestep.network.ports import Line, highest
from samestep.network.rounds import Exchange

SIZES = (0.0, 1e3, 1e6, 3e7)


def cluster(count, devices=1, more="", network=""):
    return parse(
        f"[nodes]\ncount = {count}\ndevices = {devices}\n[links]\n"
        'inside = { latency = "1 us", bandwidth = "40 GB/s" }\n'
        'between = { latency = "5 us", bandwidth = "10 GB/s" }\n'
        f"{more}\n[network]\n{network}"
    )


def by_name(found):
    return {one.name: one for one in found}


def plans(told, nbytes):
    """Every plan that is not the double tree, which is compared in all its chunks."""
    for plan in CANDIDATES["all_reduce"](told.ranks, nbytes, told.links, 0):
        if not plan.name.startswith("double tree"):
            yield plan


LARGE = [(8, ""), (12, 'adding = "7 GB/s"')]  # number of ranks, links
ADDING = ["", 'adding = "7 GB/s"', 'adding = "300 MB/s"\ncrowded = 0.8']


@pytest.mark.parametrize(
    ("count", "adding"),
    [
        pytest.param(count, adding, marks=[] if count < 8 or (count, adding) in LARGE else pytest.mark.prove)
        for count in (1, 2, 3, 4, 7, 8, 12, 17)
        for adding in ADDING
    ],
)
def test_on_one_switch_every_offer_is_the_price_of_its_plan(count, adding):
    told = cluster(count, more=adding)
    found = by_name(offers(told, count))
    for nbytes in SIZES:
        for plan in plans(told, nbytes):
            expected = cost.price(plan, nbytes, told.links).seconds
            assert found[plan.name].seconds(nbytes) == pytest.approx(expected, rel=1e-12), (plan.name, nbytes)
        for way in found["double tree"].ways[:: 1 if count < 5 else 3]:
            plan = double_tree_plans.all_reduce(count, way.chunks)
            expected = cost.price(plan, nbytes, told.links).seconds
            assert way.seconds(nbytes) == pytest.approx(expected, rel=1e-12), (plan.name, nbytes)


@pytest.mark.parametrize(
    ("count", "devices", "nics"),
    [(1, 4, 1), (1, 6, 1), (2, 2, 1), (2, 4, 1), (3, 4, 1), (4, 4, 2), (3, 4, 4)],
)
def test_ranks_of_one_host_use_its_inside_and_share_its_nics_as_in_the_price_of_the_plan(count, devices, nics):
    told = cluster(count, devices, f'adding = "7 GB/s"\nnics = {nics}')
    found = by_name(offers(told, told.ranks))
    for nbytes in SIZES:
        for plan in plans(told, nbytes):
            expected = cost.price(plan, nbytes, told.links).seconds
            assert found[plan.name].seconds(nbytes) == pytest.approx(expected, rel=1e-12), (plan.name, nbytes)
        for way in found["double tree"].ways[:4:2]:
            exact = cost.price(double_tree_plans.all_reduce(told.ranks, way.chunks), nbytes, told.links).seconds
            assert exact * (1 - 1e-12) <= way.seconds(nbytes) <= 1.05 * exact


def test_closed_forms_give_the_same_for_a_thousand_ranks():
    told = cluster(1000, more='adding = "7 GB/s"')
    found = by_name(offers(told, 1000))
    forms = {
        "ring": formulas.ring(1000, 1e8, told.links),
        "segmented ring of 2": formulas.segmented_ring(1000, 1e8, told.links, 2),
        "halving and doubling": formulas.halving_doubling(1000, 1e8, told.links),
        "recursive doubling": formulas.recursive_doubling(1000, 1e8, told.links),
        "binomial tree": formulas.binomial_tree(1000, 1e8, told.links),
        "1 server": formulas.parameter_server(1000, 1e8, told.links, 1),
        "1000 servers": formulas.parameter_server(1000, 1e8, told.links, 1000),
        "torus 25x40": formulas.torus(25, 40, 1e8, told.links),
    }
    assert {name: found[name].seconds(1e8) for name in forms} == pytest.approx(forms, rel=1e-9)


NETWORKS = [
    'kind = "torus"\ndims = [4, 8]',
    'kind = "fat-tree"\nhosts = 8\noversubscription = 4',
    'kind = "slim-fly"\nq = 4',
]


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("placement", ["linear", "random"])
def test_on_a_network_offers_are_what_contention_says(network, placement):
    told = cluster(32, network=f'{network}\nplacement = "{placement}"')
    found = by_name(offers(told, 32))
    rules = {
        "ring": rounds.ring,
        "halving and doubling": rounds.halving_doubling,
        "recursive doubling": rounds.recursive_doubling,
        "binomial tree": rounds.binomial_tree,
    }
    for name, rule in rules.items():
        expected = contended_price(rule(32, 1e7), told.topology, told.place(32), told.routing)
        assert found[name].seconds(1e7) == pytest.approx(expected.seconds, rel=1e-12)
        assert found[name].contention == pytest.approx(expected.contention, rel=1e-12)
        assert found[name].rounds == expected.rounds


def test_the_best_chunks_are_taken_for_each_number_of_bytes():
    tree = by_name(offers(cluster(64), 64))["double tree"]
    assert [way.chunks for way in tree.ways] == list(CHUNKS)
    assert [tree.way(nbytes).chunks for nbytes in (1.0, 1e5, 1e6, 1e9)] == [1, 2, 8, 64]
    assert all(tree.seconds(nbytes) <= way.seconds(nbytes) for nbytes in SIZES for way in tree.ways)


def test_latency_and_seconds_a_byte_are_those_of_the_ends():
    ring = by_name(offers(cluster(8, more='adding = "7 GB/s"'), 8))["ring"]
    assert ring.latency_s == pytest.approx(14 * 5e-6)
    assert ring.seconds_per_byte == pytest.approx(7 / 8 * (2 / 10e9 + 1 / 7e9))
    assert ring.rounds == 14


def test_the_sums_of_several_stages_share_the_hosts_ports():
    told = cluster(4, 2)
    alone, beside = (by_name(offers(told, 4, stages))["ring"] for stages in (1, 2))
    crossing = by_name(offers(cluster(4), 4))["ring"]
    assert beside.latency_s == pytest.approx(crossing.latency_s)
    assert beside.seconds_per_byte == pytest.approx(2 * crossing.seconds_per_byte)
    assert alone.seconds(1e8) < beside.seconds(1e8)


@pytest.mark.parametrize(
    ("count", "devices", "ranks", "stages", "name", "why"),
    [
        (8, 1, 7, 1, "torus", "7 ranks make no grid"),
        (8, 1, 8, 1, "hierarchical (ring)", "each host has one rank of the sum"),
        (2, 4, 4, 1, "hierarchical (ring)", "all 4 ranks are on one host"),
        (2, 4, 7, 1, "hierarchical (ring)", "7 ranks are not 4 on each host"),
        (4, 4, 4, 3, "hierarchical (ring)", "4 devices of a host cannot be shared evenly among 3 stages"),
        (1, 1, 1, 1, "1 servers", "one rank needs no servers"),
    ],
)
def test_what_cannot_be_taken_says_why_and_is_never_best(count, devices, ranks, stages, name, why):
    found = offers(cluster(count, devices), ranks, stages)
    one = by_name(found)[name]
    assert why in one.unavailable
    assert (one.seconds(1e6), one.rounds, one.contention) == (math.inf, 0, 1)
    assert best(found, 1e6).unavailable == ""


def test_one_rank_has_nothing_to_send():
    assert {one.seconds(1e9) for one in offers(cluster(1), 1) if not one.unavailable} == {0.0}


def test_few_bytes_take_few_rounds_and_many_the_fewest_bytes():
    found = offers(cluster(64), 64)
    assert [best(found, nbytes).name for nbytes in (1e3, 1e9)] == ["recursive doubling", "halving and doubling"]


def test_more_ranks_than_the_cluster_has_are_refused():
    with pytest.raises(UsageError, match="10 ranks do not fit 3 hosts of 3 devices: give 1 to 9"):
        offers(cluster(3, 3), 5, stages=2)


def test_what_is_hidden_is_what_the_next_round_has_no_time_for():
    one, slow = (Line(0.0, 1.0),), (Line(0.0, 2.0),)
    assert Term(one, 3.0, hidden=True, after=slow, times=2).seconds(1.0) == 2 * 1 + (3 - 1) + (3 - 2)
    assert Term(one, 0.5, hidden=True, after=slow, times=2).seconds(1.0) == 2 * 1
    assert Term(one, 0.5, hidden=False, after=(), times=2).seconds(1.0) == 2 * 1.5


def test_no_line_that_is_ever_highest_is_left_out():
    lines = [Line(latency, slope) for latency in (0.0, 1.0, 2.0) for slope in (3.0, 2.0, 1.0) if latency != slope]
    for nbytes in (0.0, 0.1, 0.5, 1.0, 2.0, 10.0):
        assert max(one.seconds(nbytes) for one in highest(lines)) == max(one.seconds(nbytes) for one in lines)


@pytest.mark.parametrize("placement", ["linear", "random"])
def test_an_exchange_of_which_some_is_counted_is_not_too_short(monkeypatch, placement):
    told = cluster(200, network=f'kind = "slim-fly"\nq = 5\nplacement = "{placement}"')
    whole = contended_price([Exchange(200, 1e6)], told.topology, told.place(200))
    monkeypatch.setattr("samestep.network.contention._MOST", 0)
    some = contended_price([Exchange(200, 1e6)], told.topology, told.place(200))
    assert 0.95 * whole.price.transfer_s <= some.price.transfer_s <= 2.5 * whole.price.transfer_s
    assert some.price.latency_s == whole.price.latency_s


def test_groups_side_by_side_exchange_within_themselves():
    told = cluster(12)
    alone = contended_price([Exchange(4, 1.0)], told.topology, told.place(4))
    beside = contended_price(rounds.apart([Exchange(4, 1.0)], 3), told.topology, told.place(12))
    assert beside.price == alone.price


LARGE = {
    "torus": 'kind = "torus"\ndims = [50, 40, 50]',
    "fat tree": 'kind = "fat-tree"\nports = 74',
    "Slim Fly": 'kind = "slim-fly"\nq = 41',
}


@pytest.mark.prove
@pytest.mark.timeout(600)
@pytest.mark.parametrize("network", LARGE.values(), ids=LARGE)
def test_a_hundred_thousand_ranks_are_counted_in_seconds(network):
    begun, peak = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = offers(cluster(100_000, network=network), 100_000)
    taken = time.process_time() - begun
    print(f"{network}: {taken:.1f} s, {(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) / 1024:.0f} MB more")
    assert taken < 40
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 2 << 20
    assert all(one.seconds(1e8) >= 2 * 5e-6 for one in found)
