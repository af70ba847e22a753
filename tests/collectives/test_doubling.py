"""Recursive doubling, against the picture in its docstring."""

from __future__ import annotations

import pytest

from samestep.collectives import doubling
from samestep.collectives.proof import prove
from samestep.errors import UsageError


def test_four_ranks_meet_their_neighbour_then_the_one_two_away():
    partners = [[one.target for one in transfers] for transfers in doubling.all_reduce(4).rounds]
    assert partners == [[1, 0, 3, 2], [2, 3, 0, 1]]


@pytest.mark.parametrize(
    ("ranks", "rounds"), [(1, 0), (2, 1), (3, 3), (4, 2), (6, 4), (7, 4), (8, 3), (64, 6), (65, 8)]
)
def test_rounds_are_the_logarithm_and_two_more_unless_a_power_of_two(ranks, rounds):
    assert len(doubling.all_reduce(ranks).rounds) == rounds


def test_all_elements_are_added_in_one_order_for_any_number_of_ranks():
    for ranks in range(1, 65):
        assert prove(doubling.all_reduce(ranks)).uniform


def test_ranks_that_sit_out_are_added_to_their_neighbour_first():
    assert str(prove(doubling.all_reduce(7)).sums[0]) == "(((0+1)+(2+3))+((4+5)+6))"


def test_fewer_than_one_rank_are_refused():
    with pytest.raises(UsageError, match="over -1 ranks"):
        doubling.all_reduce(-1)
