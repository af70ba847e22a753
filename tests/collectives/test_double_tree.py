"""The two trees: that they are trees, that they share the work, and that nobody does two things at once."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import pytest

from samestep.collectives import double_tree
from samestep.collectives.proof import prove
from samestep.errors import UsageError

RANKS = range(2, 65)


def of_tree(ranks, number):
    return [(edge.upper, edge.lower) for edge in double_tree.edges(ranks) if edge.tree == number]


def depth(above, rank):
    return 0 if rank == 0 else 1 + depth(above, above[rank])


def test_seven_ranks_have_the_trees_of_the_picture():
    assert sorted(of_tree(7, 0)) == [(0, 4), (2, 1), (2, 3), (4, 2), (4, 6), (6, 5)]
    assert sorted(of_tree(7, 1)) == [(0, 3), (1, 2), (3, 1), (3, 5), (5, 4), (5, 6)]


@pytest.mark.parametrize("number", [0, 1])
def test_each_tree_reaches_every_rank_once_and_none_far_from_the_root(number):
    for ranks in RANKS:
        above = {lower: upper for upper, lower in of_tree(ranks, number)}
        assert sorted(above) == list(range(1, ranks))
        assert max(depth(above, rank) for rank in above) <= (ranks - 1).bit_length()


def test_nobody_passes_both_halves_on():
    for ranks in RANKS:
        inner = [{upper for upper, _ in of_tree(ranks, number)} - {0} for number in (0, 1)]
        assert not inner[0] & inner[1]


def test_edges_that_meet_have_two_colours():
    for ranks in RANKS:
        colour = double_tree.colours(double_tree.edges(ranks))
        for one, other in combinations(colour, 2):
            if one.upper == other.upper or one.lower == other.lower:
                assert colour[one] != colour[other]


def test_no_rank_sends_or_receives_two_messages_in_a_round():
    for ranks in RANKS:
        for transfers in double_tree.broadcast(ranks, chunks=3).rounds:
            assert max(Counter(one.source for one in transfers).values()) == 1
            assert max(Counter(one.target for one in transfers).values()) == 1


@pytest.mark.parametrize("chunks", [1, 2, 5])
def test_rounds_are_two_a_chunk_and_two_a_level(chunks):
    for ranks in RANKS:
        most = 2 * chunks + 2 * (ranks - 1).bit_length() - 2
        assert most - 1 <= len(double_tree.broadcast(ranks, chunks=chunks).rounds) <= most


def test_a_rank_sends_little_more_than_the_buffer_when_it_broadcasts():
    # one half to two others, and the root each half once
    assert double_tree.broadcast(9, chunks=4).bytes_sent(1) == 1


def test_the_halves_are_added_along_different_trees():
    sums = list(map(str, prove(double_tree.all_reduce(8, chunks=2)).sums))
    assert sums[0] == sums[1]
    assert sums[2] == sums[3]
    assert sums[0] != sums[2]


@pytest.mark.parametrize("make", [double_tree.broadcast, double_tree.reduce, double_tree.all_reduce])
def test_fewer_than_one_chunk_is_refused(make):
    with pytest.raises(UsageError, match="chunks is 0"):
        make(4, chunks=0)
