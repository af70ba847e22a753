"""The binomial tree, against the picture in its docstring."""

from __future__ import annotations

import pytest

from samestep.collectives import tree
from samestep.collectives.proof import prove
from samestep.errors import UsageError


def edges(plan):
    return [[(one.source, one.target) for one in transfers] for transfers in plan.rounds]


def test_eight_ranks_are_reached_as_the_picture_says():
    assert edges(tree.broadcast(8)) == [[(0, 4)], [(0, 2), (4, 6)], [(0, 1), (2, 3), (4, 5), (6, 7)]]


def test_a_reduce_is_the_same_backwards():
    assert edges(tree.reduce(8)) == [[(1, 0), (3, 2), (5, 4), (7, 6)], [(2, 0), (6, 4)], [(4, 0)]]


def test_another_root_turns_the_tree_round():
    assert edges(tree.broadcast(3, root=2)) == [[(2, 1)], [(2, 0)]]


@pytest.mark.parametrize(("ranks", "rounds"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (64, 6), (65, 7)])
def test_rounds_are_the_logarithm_rounded_up(ranks, rounds):
    assert len(tree.broadcast(ranks).rounds) == rounds
    assert len(tree.all_reduce(ranks).rounds) == 2 * rounds


def test_all_elements_are_added_in_one_order_whatever_the_root():
    for ranks in range(1, 20):
        assert prove(tree.all_reduce(ranks)).uniform
        assert all(prove(tree.reduce(ranks, root)).uniform for root in range(ranks))


def test_a_root_that_is_no_rank_is_refused():
    with pytest.raises(UsageError, match="rank 5 cannot be the root of 5 ranks: give one of 0 to 4"):
        tree.broadcast(5, root=5)
