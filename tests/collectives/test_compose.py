"""Plans made of plans."""

from __future__ import annotations

import pytest

from samestep.collectives import tree
from samestep.collectives.compose import Fold, backwards, placed, rotated, side_by_side
from samestep.collectives.plan import Plan, Transfer
from samestep.collectives.proof import prove


def test_a_broadcast_backwards_is_a_reduce_to_the_same_root():
    for ranks in (1, 2, 3, 6, 8):
        spread = tree.broadcast(ranks, root=ranks - 1)
        prove(Plan("backwards", "reduce", ranks, 1, backwards(spread.rounds), root=ranks - 1))


def test_ranks_and_blocks_are_renamed():
    (moved,) = placed(((Transfer(0, 1, 1, 3, True),),), ranks=[4, 7], edges=[10, 20, 25, 40])
    assert moved == (Transfer(4, 7, 20, 40, True),)


def test_plans_side_by_side_keep_their_rounds_and_the_longer_goes_on_alone():
    short, long = ((Transfer(0, 1, 0, 1),),), ((Transfer(2, 3, 0, 1),), (Transfer(3, 2, 1, 2),))
    assert side_by_side([short, long]) == ((short[0][0], long[0][0]), (long[1][0],))


def test_a_rotation_gives_rank_0s_part_to_the_root():
    assert rotated(((Transfer(0, 2, 0, 1),),), ranks=3, root=2) == ((Transfer(2, 1, 0, 1),),)


@pytest.mark.parametrize(
    ("ranks", "members", "idle"),
    [(1, [0], []), (4, [0, 1, 2, 3], []), (5, [0, 2, 3, 4], [1]), (7, [0, 2, 4, 6], [1, 3, 5])],
)
def test_a_fold_leaves_a_power_of_two(ranks, members, idle):
    fold = Fold(ranks)
    assert fold.members == members
    assert list(fold.idle) == idle


def test_a_power_of_two_needs_no_round_to_fold():
    assert Fold(8).gather([0] * 8, [1] * 8, adds=True) == ()
    assert Fold(8).scatter([0] * 8, [1] * 8) == ()
