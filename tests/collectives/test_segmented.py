"""Segments: the ring cut finer, and the chain."""

from __future__ import annotations

from itertools import pairwise

import pytest

from samestep.collectives import ring, segmented
from samestep.collectives.plan import Transfer
from samestep.collectives.proof import prove
from samestep.errors import UsageError
from samestep.network.cost import price
from samestep.network.links import Link, Links


def test_one_segment_is_the_ring():
    assert segmented.all_reduce(5, 1).rounds == ring.all_reduce(5).rounds


def test_segments_of_a_chunk_follow_each_other():
    plan = segmented.all_reduce(4, 2)
    # rank 0 sends chunk 3 = blocks 6, 7; then chunk 2 = blocks 4, 5; then chunk 1 ...
    assert [transfers[0].begin for transfers in plan.rounds] == [6, 7, 4, 5, 2, 3, 0, 1, 6, 7, 4, 5]


def test_no_round_sends_what_the_round_before_brought():
    rounds = segmented.all_reduce(6, 2).rounds
    for before, after in pairwise(rounds):
        brought = {(one.target, one.begin) for one in before}
        assert not brought & {(one.source, one.begin) for one in after}


def test_adding_costs_nothing_as_long_as_it_is_quicker_than_a_message():
    links = Links(Link(0, 1e9), adding_bytes_per_s=2e9)
    assert price(ring.all_reduce(8), 1e6, links).adding_s > 0
    assert price(segmented.all_reduce(8, 2), 1e6, links).adding_s == 0


def test_three_segments_go_down_a_chain_as_the_picture_says():
    assert segmented.broadcast(4, segments=3).rounds == (
        (Transfer(0, 1, 0, 1),),
        (Transfer(0, 1, 1, 2), Transfer(1, 2, 0, 1)),
        (Transfer(0, 1, 2, 3), Transfer(1, 2, 1, 2), Transfer(2, 3, 0, 1)),
        (Transfer(1, 2, 2, 3), Transfer(2, 3, 1, 2)),
        (Transfer(2, 3, 2, 3),),
    )


def test_a_chain_adds_from_its_far_end_to_the_root_for_all_segments_alike():
    proof = prove(segmented.reduce(4, segments=3))
    assert proof.uniform
    assert str(proof.sums[0]) == "(0+(1+(2+3)))"


def test_a_segmented_ring_adds_as_a_ring_does():
    finer = [str(each) for each in prove(segmented.all_reduce(5, 3)).sums]
    assert finer[::3] == finer[1::3] == finer[2::3] == [str(each) for each in prove(ring.all_reduce(5)).sums]


@pytest.mark.parametrize("make", [segmented.all_reduce, segmented.reduce_scatter, segmented.all_gather])
def test_fewer_than_one_segment_is_refused(make):
    with pytest.raises(UsageError, match="segments is 0: give 1 or more"):
        make(4, 0)


@pytest.mark.parametrize("make", [segmented.broadcast, segmented.reduce])
def test_a_chain_needs_a_root_and_segments(make):
    with pytest.raises(UsageError, match="rank 4 cannot be the root"):
        make(4, root=4)
    with pytest.raises(UsageError, match="segments is -1"):
        make(4, segments=-1)
