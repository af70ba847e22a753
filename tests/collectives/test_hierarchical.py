"""The hierarchy: what stays inside a host, and what crosses."""

from __future__ import annotations

import pytest

from samestep.collectives import doubling, halving, hierarchical, tree
from samestep.collectives.proof import prove
from samestep.errors import UsageError


def crossing(plan, local):
    return [one for transfers in plan.rounds for one in transfers if one.source // local != one.target // local]


def test_two_hosts_of_three_reduce_inside_cross_and_gather_inside():
    plan = hierarchical.all_reduce(6, local=3)
    hosts_apart = [{abs(one.source // 3 - one.target // 3) for one in transfers} for transfers in plan.rounds]
    assert hosts_apart == [{0}, {0}, {1}, {1}, {0}, {0}]


def test_every_rank_crosses_with_its_own_chunk_and_its_peers_only():
    for one in crossing(hierarchical.all_reduce(12, local=4), 4):
        assert one.source % 4 == one.target % 4
        assert one.begin // 3 == one.source % 4


@pytest.mark.parametrize("across", [halving.all_reduce, doubling.all_reduce, tree.all_reduce])
def test_any_all_reduce_may_go_between_the_hosts(across):
    plan = hierarchical.all_reduce(15, local=3, across=across)
    assert across(5).name in plan.name
    assert prove(plan).identical


def test_one_host_or_one_rank_a_host_are_hierarchies_too():
    for local in (1, 7):
        assert prove(hierarchical.all_reduce(7, local)).identical


def test_a_broadcast_crosses_to_each_host_once():
    plan = hierarchical.broadcast(12, local=4, root=6)
    assert len(crossing(plan, 4)) == 2
    assert {one.source for one in plan.rounds[0]} == {6}


@pytest.mark.parametrize("local", [0, 4, 7, -1])
def test_ranks_that_hosts_cannot_share_evenly_are_refused(local):
    with pytest.raises(UsageError, match=f"6 ranks cannot be {local} on each host"):
        hierarchical.all_reduce(6, local)
    with pytest.raises(UsageError, match=f"6 ranks cannot be {local} on each host"):
        hierarchical.broadcast(6, local)
