"""The closed forms against the prices of the plans: equal to the last digit, in fractions."""

from __future__ import annotations

from fractions import Fraction
from math import ceil, log2

import pytest

from samestep.collectives import double_tree, doubling, halving, hierarchical, ring, segmented, server, torus, tree
from samestep.errors import UsageError
from samestep.network import formulas
from samestep.network.cost import price
from samestep.network.links import Link, Links

N = Fraction(1_000_003)
QUICK_ADDS = Links(Link(Fraction(1, 50_000), Fraction(10**9)), adding_bytes_per_s=Fraction(4 * 10**9))
SLOW_ADDS = Links(Link(Fraction(1, 10**6), Fraction(10**9)), adding_bytes_per_s=Fraction(10**8))
CROWDED = Links(
    Link(Fraction(1, 50_000), Fraction(10**9)), adding_bytes_per_s=Fraction(4 * 10**9), crowded=Fraction(4, 5)
)
RANKS = [*range(1, 18), 24, 25, 31, 32, 33]


@pytest.fixture(params=[QUICK_ADDS, SLOW_ADDS, CROWDED], ids=["quick adds", "slow adds", "crowded"])
def links(request):
    return request.param


@pytest.mark.parametrize(
    ("make", "formula"),
    [
        (ring.all_reduce, formulas.ring),
        (doubling.all_reduce, formulas.recursive_doubling),
        (halving.all_reduce, formulas.halving_doubling),
        (tree.all_reduce, formulas.binomial_tree),
        (tree.broadcast, formulas.tree_broadcast),
    ],
    ids=["ring", "doubling", "halving", "tree", "tree broadcast"],
)
def test_price_and_formula_are_equal_for_any_number_of_ranks(make, formula, links):
    for ranks in RANKS:
        assert price(make(ranks), N, links).seconds == formula(ranks, N, links), ranks


@pytest.mark.parametrize("segments", [1, 2, 5])
def test_the_segmented_rings_formula_is_its_price(segments, links):
    for ranks in range(1, 14):
        expected = formulas.segmented_ring(ranks, N, links, segments)
        assert price(segmented.all_reduce(ranks, segments), N, links).seconds == expected, ranks


def test_the_parameter_servers_formula_is_its_price_for_any_number_of_servers(links):
    for ranks in (1, 2, 3, 5, 8, 13):
        for servers in range(1, ranks + 1):
            expected = formulas.parameter_server(ranks, N, links, servers)
            assert price(server.all_reduce(ranks, servers), N, links).seconds == expected, (ranks, servers)


def test_only_who_sends_to_several_and_hears_from_several_is_crowded():
    for plan in (server.all_reduce(8, 8), server.all_reduce(8, 3)):
        alone, crowded = (price(plan, N, links) for links in (QUICK_ADDS, CROWDED))
        assert crowded.transfer_s == alone.transfer_s / CROWDED.crowded
    for plan in (ring.all_reduce(8), halving.all_reduce(7), server.all_reduce(8, 1), double_tree.all_reduce(8, 4)):
        assert price(plan, N, CROWDED) == price(plan, N, QUICK_ADDS)


@pytest.mark.parametrize("segments", [1, 3, 8])
def test_the_chains_formula_is_its_price(segments, links):
    for ranks in RANKS:
        expected = formulas.chain_broadcast(ranks, N, links, segments)
        assert price(segmented.broadcast(ranks, 0, segments), N, links).seconds == expected, ranks


def test_the_toruss_formula_is_its_price(links):
    for rows, columns in ((1, 1), (1, 5), (2, 3), (4, 4), (5, 7)):
        expected = formulas.torus(rows, columns, N, links)
        assert price(torus.all_reduce(rows, columns), N, links).seconds == expected, (rows, columns)


def test_four_directions_over_four_ports_quarter_a_square_toruss_transfer():
    one = price(torus.all_reduce(4, 4), N, QUICK_ADDS)
    four = price(torus.all_reduce(4, 4, parts=4), N, Links(QUICK_ADDS.inside, ports=4))
    assert four.latency_s == one.latency_s
    assert four.transfer_s == one.transfer_s / 4


@pytest.mark.parametrize("chunks", [1, 2, pytest.param(7, marks=pytest.mark.prove)])
def test_a_double_tree_takes_its_formula_or_one_round_less_a_phase(chunks, links):
    for ranks in RANKS[1:]:
        most = formulas.double_tree_broadcast(ranks, N, links, chunks)
        taken = price(double_tree.broadcast(ranks, 0, chunks), N, links).seconds
        assert most - links.inside.seconds(N / (2 * chunks)) <= taken <= most, ranks
        both = price(double_tree.all_reduce(ranks, chunks), N, links).seconds
        assert 2 * taken < both <= formulas.double_tree(ranks, N, links, chunks), ranks


@pytest.mark.parametrize("nics", [1, 2])
def test_the_hierarchys_formula_is_its_price(nics):
    for hosts, local in ((1, 4), (2, 2), (3, 4), (8, 2)):
        links = Links(
            QUICK_ADDS.inside,
            Link(Fraction(1, 10_000), Fraction(10**8)),
            local=local,
            adding_bytes_per_s=QUICK_ADDS.adding_bytes_per_s,
            nics=nics,
        )
        expected = formulas.hierarchical(hosts * local, N, links)
        assert price(hierarchical.all_reduce(hosts * local, local), N, links).seconds == expected, (hosts, local)


def test_hosts_of_different_sizes_have_no_formula():
    with pytest.raises(UsageError, match="multiple of 4"):
        formulas.hierarchical(6, N, Links(QUICK_ADDS.inside, QUICK_ADDS.inside, local=4))


def test_no_algorithm_is_below_the_bounds_that_no_algorithm_can_be_below():
    flat = [formulas.ring, formulas.recursive_doubling, formulas.halving_doubling, formulas.binomial_tree]
    only_latency = Links(Link(1.0, float("inf")))
    only_transfer = Links(Link(0.0, 1.0))
    for ranks in range(2, 65):
        for formula in flat:
            assert formula(ranks, 1.0, only_latency) >= ceil(log2(ranks))
            assert formula(ranks, 1.0, only_transfer) >= 2 * (ranks - 1) / ranks - 1e-12


@pytest.mark.parametrize("ranks", [4, 9, 64])
@pytest.mark.parametrize("nbytes", [1e4, 1e6, 1e8])
def test_the_best_number_of_pieces_is_better_than_others(ranks, nbytes):
    link = Link(20e-6, 1e9)
    chunks = formulas.best_chunks(ranks, nbytes, link)
    segments = formulas.best_segments(ranks, nbytes, link)
    for other in (1, 2, 4, 8, 16, 32, 64):
        tree_s = [formulas.double_tree_broadcast(ranks, nbytes, Links(link), each) for each in (chunks, other)]
        chain_s = [formulas.chain_broadcast(ranks, nbytes, Links(link), each) for each in (segments, other)]
        # whole pieces: the best of them may lie beside the rounded optimum
        assert tree_s[0] <= tree_s[1] * 1.01
        assert chain_s[0] <= chain_s[1] * 1.01


def test_pieces_are_as_many_as_allowed_where_messages_cost_nothing():
    assert formulas.best_chunks(8, 1e6, Link(0, 1e9), most=16) == 16
    assert formulas.best_segments(2, 1e6, Link(20e-6, 1e9)) == 1
