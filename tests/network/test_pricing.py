"""The price of rounds: counted by hand, against a plain oracle, and against closed forms."""

from __future__ import annotations

from fractions import Fraction
from math import ceil, log2
from typing import get_args

import numpy as np
import price_in_fractions
import pytest

import closed_forms
from samestep.collectives import double_tree, doubling, halving, hierarchical, ring, segmented, server, torus, tree
from samestep.collectives.choose import possible_plans
from samestep.collectives.plan import Operation, Plan, Transfer
from samestep.errors import UsageError
from samestep.network.links import Link, Links
from samestep.network.pricing import Line, Price, Term, price, price_lines, upper_envelope

ALPHA, BETA, GAMMA = 100.0, 1.0, 0.25
LINKS = Links(Link(ALPHA, 1 / BETA), adding_bytes_per_s=1 / GAMMA)
N = 8.0  # bytes


def plan_of(*rounds, blocks=1, ranks=6):
    return Plan.from_transfers("mine", "all_reduce", ranks, blocks, tuple(map(tuple, rounds)))


def seconds(*rounds, blocks=1, links=LINKS):
    """The price, where the oracle agrees."""
    plan = plan_of(*rounds, blocks=blocks)
    found = price(plan, N, links)
    assert found.seconds == pytest.approx(price_in_fractions.price(plan, N, links).seconds, rel=1e-12)
    return found.seconds


def test_a_plan_without_rounds_is_free():
    assert seconds() == 0


def test_one_message_costs_its_latency_and_its_bytes():
    assert price(plan_of([Transfer(0, 1, 0, 1)]), N, LINKS) == Price(ALPHA, N * BETA, 0)


def test_sending_and_receiving_at_once_costs_no_more():
    assert seconds([Transfer(0, 1, 0, 1, True), Transfer(1, 0, 0, 1, True)]) == ALPHA + N * BETA + N * GAMMA


def test_messages_from_one_rank_leave_one_after_another():
    assert seconds([Transfer(0, 1, 0, 1), Transfer(0, 2, 0, 1)]) == 2 * (ALPHA + N * BETA)


def test_messages_to_one_rank_arrive_one_after_another():
    arriving = [Transfer(1, 0, 0, 1, True), Transfer(2, 0, 0, 1, True)]
    assert seconds(arriving) == 2 * (ALPHA + N * BETA + N * GAMMA)


def test_messages_between_other_ranks_cost_nothing_more():
    assert seconds([Transfer(0, 1, 0, 1), Transfer(2, 3, 0, 1)]) == ALPHA + N * BETA


def test_a_round_lasts_as_long_as_its_slowest_rank():
    assert seconds([Transfer(0, 1, 0, 4), Transfer(2, 3, 0, 1)], blocks=4) == ALPHA + N * BETA


def test_several_ports_take_messages_side_by_side_but_cut_none():
    two = Links(LINKS.inside, ports=2)
    even = [Transfer(0, 1, 0, 2), Transfer(0, 2, 2, 4)]
    assert seconds(even, blocks=4, links=two) == ALPHA + N / 2 * BETA
    uneven = [Transfer(0, 1, 0, 3), Transfer(0, 2, 3, 4)]
    assert seconds(uneven, blocks=4, links=two) == ALPHA + N * 3 / 4 * BETA


def test_what_is_sent_on_must_be_added_first():
    passed_on = ([Transfer(0, 1, 0, 1, True)], [Transfer(1, 2, 0, 1, True)])
    assert seconds(*passed_on) == 2 * (ALPHA + N * BETA) + 2 * N * GAMMA


def test_what_is_replaced_must_be_added_first():
    replaced = ([Transfer(0, 1, 0, 1, True)], [Transfer(2, 1, 0, 1)])
    assert seconds(*replaced) == 2 * (ALPHA + N * BETA) + N * GAMMA


def test_what_nobody_waits_for_is_added_while_the_next_round_travels():
    apart = ([Transfer(0, 1, 0, 1, True)], [Transfer(1, 2, 1, 2, True)])
    assert seconds(*apart, blocks=2) == 2 * (ALPHA + N / 2 * BETA) + N / 2 * GAMMA  # the last is added at the end


def test_adding_that_takes_longer_than_the_next_round_shows_for_the_rest():
    slow = Links(Link(ALPHA, 1 / BETA), adding_bytes_per_s=1 / 100)
    apart = ([Transfer(0, 1, 0, 1, True)], [Transfer(1, 2, 1, 2)])
    assert seconds(*apart, blocks=2, links=slow) == ALPHA + N / 2 * BETA + N / 2 * 100


TWO_HOSTS = Links(Link(1.0, 10.0), Link(50.0, 1.0), local=2)


def test_messages_between_hosts_take_the_slower_link():
    assert seconds([Transfer(0, 1, 0, 1)], links=TWO_HOSTS) == 1 + N / 10
    assert seconds([Transfer(1, 2, 0, 1)], links=TWO_HOSTS) == 50 + N


def test_ranks_of_a_host_share_its_nic():
    both = [Transfer(0, 2, 0, 1), Transfer(1, 3, 0, 1)]
    assert seconds(both, links=TWO_HOSTS) == 50 + 2 * N
    railed = Links(TWO_HOSTS.inside, TWO_HOSTS.between, local=2, nics=2)
    assert seconds(both, links=railed) == 50 + N


def test_what_enters_a_host_shares_its_nic_too():
    assert seconds([Transfer(2, 0, 0, 1), Transfer(4, 1, 0, 1)], links=TWO_HOSTS) == 50 + 2 * N


def test_a_host_that_sends_and_receives_at_once_does_so_at_full_speed():
    assert seconds([Transfer(0, 2, 0, 1, True), Transfer(3, 1, 0, 1, True)], links=TWO_HOSTS) == 50 + N


def test_halving_keeps_its_largest_halves_on_the_host():
    far_first = halving.reduce_scatter(8)
    near_first = Plan.from_transfers("mine", "all_reduce", 8, 8, halving.all_reduce(8).rounds[:3])
    links = Links(Link(0, 100.0), Link(0, 1.0), local=4)
    assert price(near_first, N, links).seconds < price(far_first, N, links).seconds / 3


def test_a_hierarchy_sends_less_through_the_nic_than_a_ring_where_hosts_are_few():
    links = Links(Link(0, float("inf")), Link(0, 1.0), local=8)
    assert price(hierarchical.all_reduce(16, 8), 16, links).seconds == 16
    assert price(ring.all_reduce(16), 16, links).seconds == 30


@pytest.mark.parametrize(
    "plan", [ring.all_reduce(6), doubling.all_reduce(6), halving.all_reduce(6)], ids=lambda p: p.name
)
def test_the_parts_of_a_price_are_the_whole(plan):
    cost = price(plan, N, LINKS)
    assert cost.latency_s + cost.transfer_s + cost.adding_s == cost.seconds
    assert min(cost.latency_s, cost.transfer_s, cost.adding_s) > 0


def test_no_line_that_is_ever_highest_is_left_out():
    lines = [(latency, slope) for latency in (0.0, 1.0, 2.0) for slope in (3.0, 2.0, 1.0) if latency != slope]
    latency, slope = map(np.array, zip(*lines, strict=True))
    kept = upper_envelope(latency, slope, np.zeros(len(lines)))
    for nbytes in (0.0, 0.1, 0.5, 1.0, 2.0, 10.0):
        assert max(one.price(nbytes).seconds for one in kept) == (latency + nbytes * slope).max()


def test_what_is_hidden_is_what_the_round_has_no_time_for():
    term = Term((Line(1.0, 2.0, 0.5),), hidden=4.0)
    assert term.price(1.0) == Price(1.0, 2.0, 1.0)  # added before the round, and half a second more meanwhile
    assert term.price(0.1) == Price(1.0, 0.2, 0.05)
    assert [term.seconds(nbytes) for nbytes in (0.0, 0.1, 1.0)] == [1.0, 1.25, 4.0]


CASES = {
    "quick adds": Links(Link(20e-6, 1e9), adding_bytes_per_s=4e9),
    "slow adds": Links(Link(1e-6, 1e9), adding_bytes_per_s=1e8),
    "crowded": Links(Link(20e-6, 1e9), adding_bytes_per_s=4e9, crowded=0.8),
    "ports": Links(Link(20e-6, 1e9), adding_bytes_per_s=4e9, ports=4),
    "hosts": Links(Link(1e-6, 100e9), Link(5e-6, 10e9), local=4, adding_bytes_per_s=7e9),
    "NICs": Links(Link(1e-6, 100e9), Link(5e-6, 10e9), local=4, adding_bytes_per_s=7e9, nics=2),
    "crowded hosts": Links(Link(1e-6, 100e9), Link(5e-6, 10e9), local=2, crowded=0.7),
}


@pytest.mark.parametrize("links", CASES.values(), ids=CASES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 6, 8, pytest.param(12, marks=pytest.mark.prove)])
def test_every_plan_costs_what_the_plain_oracle_says(ranks, links):
    for operation in get_args(Operation):
        root = ranks // 2 if operation in ("broadcast", "reduce") else 0
        for plan in possible_plans(operation, ranks, 1e6, links, root):
            lines = price_lines(plan, links)
            assert lines.rounds == len(plan.rounds)
            for nbytes in (0.0, 1e3, 3e7):
                expected = price_in_fractions.price(plan, nbytes, links).seconds
                assert lines.seconds(nbytes) == pytest.approx(expected, rel=1e-12), (plan.name, nbytes)


EXACT = {
    "quick adds": Links(Link(Fraction(1, 50_000), Fraction(10**9)), adding_bytes_per_s=Fraction(4 * 10**9)),
    "slow adds": Links(Link(Fraction(1, 10**6), Fraction(10**9)), adding_bytes_per_s=Fraction(10**8)),
    "crowded": Links(
        Link(Fraction(1, 50_000), Fraction(10**9)), adding_bytes_per_s=Fraction(4 * 10**9), crowded=Fraction(4, 5)
    ),
}
NBYTES = Fraction(1_000_003)
RANKS = [*range(1, 10), 12, 13, 16, 17, 25]


@pytest.mark.parametrize("links", EXACT.values(), ids=EXACT)
@pytest.mark.parametrize(
    ("make", "formula"),
    [
        (ring.all_reduce, closed_forms.ring),
        (doubling.all_reduce, closed_forms.recursive_doubling),
        (halving.all_reduce, closed_forms.halving_doubling),
        (tree.all_reduce, closed_forms.binomial_tree),
        (tree.broadcast, closed_forms.tree_broadcast),
        *(
            (
                lambda ranks, k=k: segmented.all_reduce(ranks, k),
                lambda ranks, nbytes, links, k=k: closed_forms.segmented_ring(ranks, nbytes, links, k),
            )
            for k in (1, 2, 5)
        ),
        *(
            (
                lambda ranks, k=k: segmented.broadcast(ranks, 0, k),
                lambda ranks, nbytes, links, k=k: closed_forms.chain_broadcast(ranks, nbytes, links, k),
            )
            for k in (1, 3, 8)
        ),
    ],
    ids=["ring", "doubling", "halving", "tree", "broadcast", *("segments",) * 3, *("chain",) * 3],
)
def test_oracle_and_closed_form_are_equal_to_the_last_digit_for_any_number_of_ranks(make, formula, links):
    for ranks in RANKS:
        plan, expected = make(ranks), formula(ranks, NBYTES, links)
        assert price_in_fractions.price(plan, NBYTES, links).seconds == expected, ranks
        assert price(plan, float(NBYTES), floats(links)).seconds == pytest.approx(float(expected), rel=1e-12), ranks


def floats(links):
    link = Link(float(links.inside.latency_s), float(links.inside.bytes_per_s))
    return Links(link, adding_bytes_per_s=float(links.adding_bytes_per_s), crowded=float(links.crowded))


@pytest.mark.parametrize("links", EXACT.values(), ids=EXACT)
def test_servers_and_tori_cost_what_their_closed_forms_say(links):
    for ranks in (1, 2, 3, 5, 8, 13):
        for servers in range(1, ranks + 1):
            expected = closed_forms.parameter_server(ranks, float(NBYTES), floats(links), servers)
            found = price(server.all_reduce(ranks, servers), float(NBYTES), floats(links)).seconds
            assert found == pytest.approx(expected, rel=1e-12), (ranks, servers)
    for rows, columns in ((1, 1), (1, 5), (2, 3), (4, 4), (5, 7)):
        expected = closed_forms.torus(rows, columns, float(NBYTES), floats(links))
        found = price(torus.all_reduce(rows, columns), float(NBYTES), floats(links)).seconds
        assert found == pytest.approx(expected, rel=1e-12), (rows, columns)


def test_only_who_sends_to_several_and_hears_from_several_is_crowded():
    plain, crowded = CASES["quick adds"], CASES["crowded"]
    for plan in (server.all_reduce(8, 8), server.all_reduce(8, 3)):
        alone, beside = (price(plan, 1e6, links) for links in (plain, crowded))
        assert beside.transfer_s == pytest.approx(alone.transfer_s / crowded.crowded)
    for plan in (ring.all_reduce(8), halving.all_reduce(7), server.all_reduce(8, 1), double_tree.all_reduce(8, 4)):
        assert price(plan, 1e6, crowded) == price(plan, 1e6, plain)


def test_four_directions_over_four_ports_quarter_a_square_toruss_transfer():
    one = price(torus.all_reduce(4, 4), 1e6, CASES["quick adds"])
    four = price(torus.all_reduce(4, 4, parts=4), 1e6, Links(CASES["quick adds"].inside, ports=4))
    assert four.latency_s == pytest.approx(one.latency_s)
    assert four.transfer_s == pytest.approx(one.transfer_s / 4)


@pytest.mark.parametrize("chunks", [1, 2, pytest.param(7, marks=pytest.mark.prove)])
def test_a_double_tree_takes_its_formula_or_one_round_less_a_phase(chunks):
    links = CASES["quick adds"]
    for ranks in RANKS[1:]:
        most = closed_forms.double_tree_broadcast(ranks, 1e6, links, chunks)
        taken = price(double_tree.broadcast(ranks, 0, chunks), 1e6, links).seconds
        assert (most - links.inside.seconds(1e6 / (2 * chunks))) * (1 - 1e-12) <= taken <= most * (1 + 1e-12), ranks
        both = price(double_tree.all_reduce(ranks, chunks), 1e6, links).seconds
        assert 2 * taken < both <= closed_forms.double_tree(ranks, 1e6, links, chunks) * (1 + 1e-12), ranks


@pytest.mark.parametrize("nics", [1, 2])
def test_the_hierarchys_formula_is_its_price(nics):
    for hosts, local in ((1, 4), (2, 2), (3, 4), (8, 2)):
        links = Links(Link(20e-6, 1e9), Link(1e-4, 1e8), local=local, adding_bytes_per_s=4e9, nics=nics)
        expected = closed_forms.hierarchical(hosts * local, 1e6, links)
        found = price(hierarchical.all_reduce(hosts * local, local), 1e6, links).seconds
        assert found == pytest.approx(expected, rel=1e-12), (hosts, local)


def test_hosts_of_different_sizes_have_no_closed_form():
    with pytest.raises(UsageError, match="multiple of 4"):
        closed_forms.hierarchical(6, 1e6, Links(Link(1e-6, 1e9), Link(1e-6, 1e9), local=4))


def test_no_algorithm_is_below_the_bounds_that_no_algorithm_can_be_below():
    only_latency, only_transfer = Links(Link(1.0, float("inf"))), Links(Link(0.0, 1.0))
    for ranks in range(2, 65):
        for make in (ring.all_reduce, doubling.all_reduce, halving.all_reduce, tree.all_reduce):
            assert price(make(ranks), 1.0, only_latency).seconds >= ceil(log2(ranks))
            assert price(make(ranks), 1.0, only_transfer).seconds >= 2 * (ranks - 1) / ranks - 1e-12


def test_closed_forms_give_the_same_for_a_thousand_ranks():
    links = Links(Link(5e-6, 10e9), adding_bytes_per_s=7e9)
    forms = {
        ring.all_reduce(1000): closed_forms.ring(1000, 1e8, links),
        segmented.all_reduce(1000): closed_forms.segmented_ring(1000, 1e8, links, 2),
        halving.all_reduce(1000): closed_forms.halving_doubling(1000, 1e8, links),
        doubling.all_reduce(1000): closed_forms.recursive_doubling(1000, 1e8, links),
        tree.all_reduce(1000): closed_forms.binomial_tree(1000, 1e8, links),
        server.all_reduce(1000): closed_forms.parameter_server(1000, 1e8, links, 1),
        server.all_reduce(1000, 1000): closed_forms.parameter_server(1000, 1e8, links, 1000),
        torus.all_reduce(25, 40): closed_forms.torus(25, 40, 1e8, links),
    }
    for plan, expected in forms.items():
        assert price(plan, 1e8, links).seconds == pytest.approx(expected, rel=1e-9), plan.name
