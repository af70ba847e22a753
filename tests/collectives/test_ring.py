"""The ring, against the picture in its docstring."""

from __future__ import annotations

import pytest

from samestep.collectives import ring
from samestep.collectives.proof import prove
from samestep.errors import UsageError


def blocks_sent(plan):
    """[round][rank]: the block that each rank sends to the next."""
    return [[one.begin for one in transfers] for transfers in plan.rounds]


def test_four_ranks_send_what_the_picture_says():
    plan = ring.all_reduce(4)
    # from:                         0  1  2  3
    assert blocks_sent(plan) == [
        [3, 0, 1, 2],
        [2, 3, 0, 1],
        [1, 2, 3, 0],
        [0, 1, 2, 3],
        [3, 0, 1, 2],
        [2, 3, 0, 1],
    ]
    assert [one.adds for transfers in plan.rounds for one in transfers] == [True] * 12 + [False] * 12


def test_every_rank_talks_to_the_next_only():
    for ranks in range(1, 20):
        for transfers in ring.all_reduce(ranks).rounds:
            assert [(one.source, one.target) for one in transfers] == [(r, (r + 1) % ranks) for r in range(ranks)]


def test_every_rank_sends_twice_the_buffer_less_two_blocks_and_nothing_can_do_with_less():
    for ranks in (1, 2, 5, 64):
        assert ring.all_reduce(ranks).bytes_sent(ranks) == 2 * (ranks - 1)


def test_each_block_is_added_on_the_way_round_to_its_own_rank():
    sums = prove(ring.reduce_scatter(4)).sums
    assert list(map(str, sums)) == ["(0+((1+2)+3))", "((0+(2+3))+1)", "(((0+3)+1)+2)", "(((0+1)+2)+3)"]


def test_the_two_halves_are_collectives_of_their_own():
    both = ring.all_reduce(7).rounds
    assert ring.reduce_scatter(7).rounds + ring.all_gather(7).rounds == both


@pytest.mark.parametrize("make", [ring.all_reduce, ring.reduce_scatter, ring.all_gather])
def test_fewer_than_one_rank_are_refused(make):
    with pytest.raises(UsageError, match="over 0 ranks"):
        make(0)
