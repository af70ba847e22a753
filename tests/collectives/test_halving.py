"""Recursive halving and doubling, against the picture in its docstring."""

from __future__ import annotations

import pytest

from samestep.collectives import doubling, halving
from samestep.collectives.proof import prove
from samestep.errors import UsageError


def given(plan, number):
    """[rank]: (partner, blocks it is given) in a round."""
    return [(one.target, *range(one.begin, one.end)) for one in sorted(plan.rounds[number])]


def test_four_ranks_give_halves_away_and_get_them_back_as_the_picture_says():
    plan = halving.all_reduce(4)
    assert given(plan, 0) == [(1, 2, 3), (0, 0, 1), (3, 2, 3), (2, 0, 1)]
    assert given(plan, 1) == [(2, 1), (3, 3), (0, 0), (1, 2)]
    assert given(plan, 2) == [(2, 0), (3, 2), (0, 1), (1, 3)]
    assert given(plan, 3) == [(1, 0, 1), (0, 2, 3), (3, 0, 1), (2, 2, 3)]


def test_the_largest_halves_go_to_the_nearest_ranks():
    for transfers, distance in zip(halving.all_reduce(16).rounds[:4], (1, 2, 4, 8), strict=True):
        assert {abs(one.source - one.target) for one in transfers} == {distance}
        assert {one.end - one.begin for one in transfers} == {8 // distance}


@pytest.mark.parametrize("ranks", [1, 2, 8, 64])
def test_a_power_of_two_sends_no_more_than_a_ring(ranks):
    assert halving.all_reduce(ranks).bytes_sent(ranks) == 2 * (ranks - 1)
    assert halving.reduce_scatter(ranks).bytes_sent(ranks) == ranks - 1
    assert halving.all_gather(ranks).bytes_sent(ranks) == ranks - 1


@pytest.mark.parametrize(("ranks", "rounds"), [(1, 0), (2, 2), (3, 4), (4, 4), (7, 6), (8, 6), (64, 12)])
def test_rounds_are_twice_the_logarithm_and_two_more_unless_a_power_of_two(ranks, rounds):
    assert len(halving.all_reduce(ranks).rounds) == rounds


def test_all_elements_are_added_in_one_order_in_the_all_reduce_and_in_the_reduce_scatter():
    for ranks in range(1, 65):
        assert prove(halving.all_reduce(ranks)).uniform
        assert prove(halving.reduce_scatter(ranks)).uniform


def test_a_reduce_scatter_begins_with_the_farthest_and_so_adds_other_pairs():
    assert str(prove(halving.reduce_scatter(4)).sums[0]) == "((0+2)+(1+3))"
    assert str(prove(doubling.all_reduce(4)).sums[0]) == "((0+1)+(2+3))"


@pytest.mark.parametrize("make", [halving.all_reduce, halving.reduce_scatter, halving.all_gather])
def test_fewer_than_one_rank_are_refused(make):
    with pytest.raises(UsageError, match="over 0 ranks"):
        make(0)
