"""The rounds that are known without a plan, against the plans, message by message."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest

from samestep.collectives import double_tree, doubling, halving, hierarchical, ring, segmented, server, torus, tree
from samestep.errors import UsageError
from samestep.network import double_tree as double_tree_rounds
from samestep.network import rounds
from samestep.network.rounds import Exchange, Round

RANKS = [1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 16, 21, 32, 33]
PATTERNS = {
    "ring": (rounds.ring, ring.all_reduce),
    "segmented ring of 1": (partial(rounds.segmented_ring, segments=1), partial(segmented.all_reduce, segments=1)),
    "segmented ring of 3": (partial(rounds.segmented_ring, segments=3), partial(segmented.all_reduce, segments=3)),
    "recursive doubling": (rounds.recursive_doubling, doubling.all_reduce),
    "halving and doubling": (rounds.halving_doubling, halving.all_reduce),
    "binomial tree": (rounds.binomial_tree, tree.all_reduce),
    "double tree": (double_tree_rounds.all_reduce, double_tree.all_reduce),
    "server": (rounds.parameter_server, server.all_reduce),
}
ACROSS = {
    "ring": (rounds.ring, ring.all_reduce),
    "halving": (rounds.halving_doubling, halving.all_reduce),
    "doubling": (rounds.recursive_doubling, doubling.all_reduce),
}


def by_rule(each):
    """Messages of every round, and what is added behind it."""
    for one in each:
        plain = one if isinstance(one, Round) else one.round()
        sent = Counter(zip(plain.sources.tolist(), plain.targets.tolist(), plain.nbytes.tolist(), strict=True))
        yield from [(sent, one.adds)] * one.times


def by_plan(plan, nbytes):
    """The same of a plan, where some rank adds most."""
    block = nbytes / plan.blocks
    for messages, one in zip(plan.rounds, rounds.of_plan(plan, nbytes), strict=True):
        sent = Counter(zip(one.sources.tolist(), one.targets.tolist(), one.nbytes.tolist(), strict=True))
        added: Counter[int] = Counter()
        for each in messages:
            added[each.target] += block * (each.end - each.begin) * each.adds
        yield sent, max(added.values(), default=0.0)


def same(rule, plan, ranks, nbytes):
    assert list(by_rule(rule)) == [(sent, pytest.approx(added)) for sent, added in by_plan(plan, nbytes)], ranks


@pytest.mark.parametrize(("rule", "plan"), PATTERNS.values(), ids=PATTERNS)
def test_the_rounds_and_what_is_added_are_those_of_the_plan(rule, plan):
    for ranks in RANKS:
        same(rule(ranks, 3.0 * ranks), plan(ranks), ranks, 3.0 * ranks)


@pytest.mark.parametrize("chunks", [1, 2, 3, 5, 8, 20])
def test_a_double_trees_rounds_are_those_of_the_plan_in_any_number_of_chunks(chunks):
    for ranks in [*range(1, 24), 31, 32, 33, 63, 64, 65, 100]:
        same(double_tree_rounds.all_reduce(ranks, 64.0, chunks), double_tree.all_reduce(ranks, chunks), ranks, 64.0)


def test_any_number_of_servers():
    for ranks in (1, 2, 3, 5, 8, 13):
        same(rounds.every_server(ranks, 64.0), server.all_reduce(ranks, ranks), ranks, 64.0)
        for servers in range(1, ranks + 1):
            same(rounds.parameter_server(ranks, 64.0, servers), server.all_reduce(ranks, servers), ranks, 64.0)


@pytest.mark.parametrize(("rule", "plan"), ACROSS.values(), ids=ACROSS)
@pytest.mark.parametrize(("hosts", "local"), [(1, 1), (1, 4), (4, 1), (2, 3), (3, 4), (5, 2), (8, 8)])
def test_hierarchical_rounds_are_those_of_the_plan_with_any_between_hosts(rule, plan, hosts, local):
    ranks, n = hosts * local, 3.0 * hosts * local
    same(rounds.hierarchical(ranks, local, n, rule), hierarchical.all_reduce(ranks, local, plan), ranks, n)


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 4), (4, 1), (2, 3), (3, 4), (5, 5)])
def test_the_rounds_of_a_grid_are_those_of_a_torus(rows, columns):
    n = 3.0 * rows * columns
    same(rounds.torus(rows, columns, n), torus.all_reduce(rows, columns), rows * columns, n)


def test_an_exchange_is_all_its_shifts_at_once():
    everyone = Exchange(5, 8.0)
    shifts = [everyone.some([distance]) for distance in range(1, 5)]
    together = Counter(zip(everyone.round().sources.tolist(), everyone.round().targets.tolist(), strict=True))
    assert together == Counter((a, b) for a in range(5) for b in range(5) if a != b)
    assert together == Counter(
        pair for one in shifts for pair in zip(one.sources.tolist(), one.targets.tolist(), strict=True)
    )


def test_a_hundred_thousand_ranks_have_a_double_tree():
    each = list(double_tree_rounds.all_reduce(100_000, 1.0, 4))
    assert len(each) <= 2 * (2 * 4 + 2 * 17 - 2)
    assert sum(len(one.sources) for one in each) == 2 * 2 * 4 * 99_999


def test_what_cannot_be_is_refused():
    for rule in (rounds.ring, rounds.segmented_ring, rounds.recursive_doubling, rounds.parameter_server):
        with pytest.raises(UsageError, match="a collective over 0 ranks: give 1 or more"):
            list(rule(0, 1.0))
    with pytest.raises(UsageError, match="9 servers among 8 ranks: give 1 to 8"):
        list(rounds.parameter_server(8, 1.0, 9))
    with pytest.raises(UsageError, match="9 ranks cannot be 2 on each host: give a number that divides 9"):
        list(rounds.hierarchical(9, 2, 1.0, rounds.ring))
    with pytest.raises(UsageError, match="a double tree of 4 ranks in 0 chunks: give 1 or more of both"):
        list(double_tree_rounds.all_reduce(4, 1.0, 0))
