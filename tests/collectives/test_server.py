"""Parameter servers, against the picture in its docstring."""

from __future__ import annotations

import pytest

from samestep.collectives import ring, server
from samestep.collectives.proof import prove
from samestep.errors import UsageError


def test_four_ranks_push_to_two_servers_and_pull_from_them():
    push, pull = server.all_reduce(4, servers=2).rounds
    assert {(one.source, one.target, one.begin) for one in push if one.adds} == {
        *((rank, 0, 0) for rank in (1, 2, 3)),
        *((rank, 2, 1) for rank in (0, 1, 3)),
    }
    assert {(one.target, one.source, one.begin) for one in pull} == {
        (one.source, one.target, one.begin) for one in push
    }


@pytest.mark.parametrize(("servers", "homes"), [(1, [0]), (2, [0, 4]), (3, [0, 2, 5]), (8, list(range(8)))])
def test_servers_are_spread_evenly_over_the_ranks(servers, homes):
    assert sorted({one.target for one in server.all_reduce(8, servers).rounds[0]}) == homes


def test_one_server_sends_and_receives_most_and_as_many_as_ranks_no_more_than_a_ring():
    assert server.all_reduce(8, 1).bytes_sent(1) == 7
    assert server.all_reduce(8, 8).bytes_sent(8) == ring.all_reduce(8).bytes_sent(8)


def test_one_server_adds_in_the_order_of_the_ranks():
    proof = prove(server.all_reduce(5, 1))
    assert proof.uniform
    assert str(proof.sums[0]) == "((((0+1)+2)+3)+4)"


def test_a_server_begins_with_its_own():
    sums = list(map(str, prove(server.all_reduce(4, 4)).sums))
    assert sums == ["(((0+1)+2)+3)", "(((0+1)+2)+3)", "(((0+2)+1)+3)", "(((0+3)+1)+2)"]


@pytest.mark.parametrize("servers", [0, 5])
def test_servers_are_ranks(servers):
    with pytest.raises(UsageError, match=rf"{servers} servers among 4 ranks: give 1 to 4"):
        server.all_reduce(4, servers)
