"""Each algorithm against the picture in its docstring; test_proof.py proves that all are right."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, pairwise

import pytest

from samestep.collectives import (
    double_tree,
    doubling,
    halving,
    hierarchical,
    ring,
    segmented,
    server,
    torus,
    tree,
)
from samestep.collectives.doubling import fold, gather_idle, scatter_idle
from samestep.collectives.plan import Plan, Transfer
from samestep.collectives.proof import prove
from samestep.collectives.torus import in_parallel
from samestep.errors import UsageError
from samestep.network.links import Link, Links
from samestep.network.messages import remap, reverse, send, with_root
from samestep.network.pricing import price

RANKS = range(2, 65)


def bytes_sent(plan, nbytes):
    """How many bytes the rank that sends most sends, of a buffer of `nbytes`."""
    sent = Counter()
    for one in (one for transfers in plan.rounds for one in transfers):
        sent[one.source] += one.end - one.begin
    return max(sent.values(), default=0) * nbytes / plan.blocks


def edges(plan):
    return [[(one.source, one.target) for one in transfers] for transfers in plan.rounds]


def sums(plan):
    return [str(each) for each in prove(plan).sums]


@pytest.mark.parametrize(
    ("make", "numbers"),
    [
        (doubling.all_reduce, {1: 0, 2: 1, 3: 3, 4: 2, 6: 4, 7: 4, 8: 3, 64: 6, 65: 8}),
        (halving.all_reduce, {1: 0, 2: 2, 3: 4, 4: 4, 7: 6, 8: 6, 64: 12}),
        (tree.broadcast, {1: 0, 2: 1, 3: 2, 4: 2, 5: 3, 64: 6, 65: 7}),
        (tree.all_reduce, {1: 0, 3: 4, 65: 14}),
        (lambda ranks: torus.all_reduce(ranks, ranks), {8: 28}),  # one ring takes 126
        (lambda ranks: torus.all_reduce(ranks, ranks, parts=4), {8: 28}),
    ],
)
def test_algorithms_take_as_many_rounds_as_their_formulas_say(make, numbers):
    assert {ranks: len(make(ranks).rounds) for ranks in numbers} == numbers


@pytest.mark.parametrize("ranks", [1, 2, 8, 64])
def test_no_rank_sends_more_than_it_must(ranks):
    for plan in (ring.all_reduce(ranks), halving.all_reduce(ranks), server.all_reduce(ranks, ranks)):
        assert bytes_sent(plan, ranks) == 2 * (ranks - 1)
    for plan in (halving.reduce_scatter(ranks), halving.all_gather(ranks)):
        assert bytes_sent(plan, ranks) == ranks - 1
    assert [bytes_sent(make(3, 5), 15) for make in (torus.all_reduce, torus.reduce_scatter)] == [28, 14]
    assert bytes_sent(double_tree.broadcast(9, chunks=4), 1) == 1  # one half to two others, and the root each half once
    assert bytes_sent(server.all_reduce(8, 1), 1) == 7


def test_all_elements_are_added_in_one_order_where_the_algorithm_says_so():
    for ranks in range(1, 65):
        for plan in (doubling.all_reduce(ranks), halving.all_reduce(ranks), halving.reduce_scatter(ranks)):
            assert prove(plan).position_independent
    for ranks in range(1, 12):
        assert prove(tree.all_reduce(ranks)).position_independent
        assert all(prove(tree.reduce(ranks, root)).position_independent for root in range(ranks))
    assert prove(segmented.reduce(4, segments=3)).position_independent


def test_sums_are_bracketed_as_the_docstrings_say():
    assert sums(ring.reduce_scatter(4)) == ["(0+((1+2)+3))", "((0+(2+3))+1)", "(((0+3)+1)+2)", "(((0+1)+2)+3)"]
    assert sums(doubling.all_reduce(7)) == ["(((0+1)+(2+3))+((4+5)+6))"]
    assert sums(halving.reduce_scatter(4))[0] == "((0+2)+(1+3))"  # begins with the farthest
    assert sums(segmented.reduce(4, segments=3))[0] == "(0+(1+(2+3)))"
    assert sums(server.all_reduce(5, 1)) == ["((((0+1)+2)+3)+4)"]
    assert sums(server.all_reduce(4, 4)) == ["(((0+1)+2)+3)", "(((0+1)+2)+3)", "(((0+2)+1)+3)", "(((0+3)+1)+2)"]
    finer = sums(segmented.all_reduce(5, 3))
    assert finer[::3] == finer[1::3] == finer[2::3] == sums(ring.all_reduce(5))
    first, _, second, _ = sums(double_tree.all_reduce(8, chunks=2))
    assert first != second


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: ring.all_reduce(0), "over 0 ranks"),
        (lambda: doubling.all_reduce(-1), "over -1 ranks"),
        (lambda: halving.all_gather(0), "over 0 ranks"),
        (lambda: double_tree.broadcast(0), "over 0 ranks"),
        (lambda: tree.broadcast(5, root=5), "rank 5 cannot be the root of 5 ranks: give one of 0 to 4"),
        (lambda: segmented.reduce(4, root=4), "rank 4 cannot be the root"),
        (lambda: segmented.all_reduce(4, 0), "segmented ring of 0: a buffer cannot be cut into 0 blocks: give 1 or"),
        (lambda: segmented.broadcast(4, segments=-1), "cut into -1 blocks"),
        (lambda: double_tree.all_reduce(4, chunks=0), "double tree of 0: a buffer cannot be cut into 0 blocks"),
        (lambda: server.all_reduce(4, 0), "0 servers among 4 ranks: give 1 to 4"),
        (lambda: server.all_reduce(4, 5), "5 servers among 4 ranks: give 1 to 4"),
        (lambda: hierarchical.all_reduce(6, 4), "6 ranks cannot be 4 on each host"),
        (lambda: hierarchical.broadcast(6, 0), "6 ranks cannot be 0 on each host"),
        (lambda: torus.all_reduce(0, 3), "a torus of 0 rows and 3 columns"),
        (lambda: torus.all_gather(3, 0), "a torus of 3 rows and 0 columns"),
        (lambda: torus.reduce_scatter(0, 2), "a torus of 0 rows"),
        (lambda: torus.all_reduce(2, 2, 3), "cut into 3 parts: give 1, 2 or 4"),
    ],
)
def test_what_is_impossible_is_refused(make, problem):
    with pytest.raises(UsageError, match=problem):
        make()


# --- ring, segmented ------------------------------------------------------------------------------


def test_four_ranks_send_what_the_picture_of_the_ring_says():
    plan = ring.all_reduce(4)
    assert [[one.begin for one in transfers] for transfers in plan.rounds] == [  # from ranks 0 to 3
        [3, 0, 1, 2],
        [2, 3, 0, 1],
        [1, 2, 3, 0],
        [0, 1, 2, 3],
        [3, 0, 1, 2],
        [2, 3, 0, 1],
    ]
    assert [one.adds for transfers in plan.rounds for one in transfers] == [True] * 12 + [False] * 12
    assert edges(plan) == [[(0, 1), (1, 2), (2, 3), (3, 0)]] * 6
    assert ring.reduce_scatter(4).rounds + ring.all_gather(4).rounds == plan.rounds


def test_segments_of_a_chunk_follow_each_other():
    assert segmented.all_reduce(5, 1).rounds == ring.all_reduce(5).rounds
    # rank 0 sends chunk 3 = blocks 6, 7; then chunk 2 = blocks 4, 5; then chunk 1 ...
    rounds = segmented.all_reduce(4, 2).rounds
    assert [transfers[0].begin for transfers in rounds] == [6, 7, 4, 5, 2, 3, 0, 1, 6, 7, 4, 5]
    for before, after in pairwise(rounds):  # no round sends what the round before brought
        received = {(one.target, one.begin) for one in before}
        assert not received & {(one.source, one.begin) for one in after}


def test_adding_costs_nothing_as_long_as_it_is_faster_than_a_message():
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


# --- doubling, halving, trees -----------------------------------------------------------------------


def test_four_ranks_meet_their_neighbour_then_the_one_two_away():
    partners = [[one.target for one in transfers] for transfers in doubling.all_reduce(4).rounds]
    assert partners == [[1, 0, 3, 2], [2, 3, 0, 1]]


def test_four_ranks_give_halves_away_and_get_them_back_as_the_picture_says():
    def given(transfers):
        return [(one.target, *range(one.begin, one.end)) for one in sorted(transfers)]

    assert list(map(given, halving.all_reduce(4).rounds)) == [
        [(1, 2, 3), (0, 0, 1), (3, 2, 3), (2, 0, 1)],
        [(2, 1), (3, 3), (0, 0), (1, 2)],
        [(2, 0), (3, 2), (0, 1), (1, 3)],
        [(1, 0, 1), (0, 2, 3), (3, 0, 1), (2, 2, 3)],
    ]


def test_the_largest_halves_go_to_the_nearest_ranks():
    for transfers, distance in zip(halving.all_reduce(16).rounds[:4], (1, 2, 4, 8), strict=True):
        assert {abs(one.source - one.target) for one in transfers} == {distance}
        assert {one.end - one.begin for one in transfers} == {8 // distance}


def test_eight_ranks_are_reached_as_the_picture_of_the_tree_says():
    assert edges(tree.broadcast(8)) == [[(0, 4)], [(0, 2), (4, 6)], [(0, 1), (2, 3), (4, 5), (6, 7)]]
    assert edges(tree.reduce(8)) == [[(1, 0), (3, 2), (5, 4), (7, 6)], [(2, 0), (6, 4)], [(4, 0)]]
    assert edges(tree.broadcast(3, root=2)) == [[(2, 1)], [(2, 0)]]


def of_tree(ranks, number):
    edges = zip(*(each.tolist() for each in double_tree.edges(ranks)), strict=True)
    return [(upper, lower) for tree, upper, lower in edges if tree == number]


def depth(above, rank):
    return 0 if rank == 0 else 1 + depth(above, above[rank])


def test_seven_ranks_have_the_two_trees_of_the_picture():
    assert sorted(of_tree(7, 0)) == [(0, 4), (2, 1), (2, 3), (4, 2), (4, 6), (6, 5)]
    assert sorted(of_tree(7, 1)) == [(0, 3), (1, 2), (3, 1), (3, 5), (5, 4), (5, 6)]


def test_each_of_two_trees_reaches_every_rank_once_and_no_rank_sends_both_halves_on():
    for ranks in RANKS:
        for number in (0, 1):
            above = {lower: upper for upper, lower in of_tree(ranks, number)}
            assert sorted(above) == list(range(1, ranks))
            assert max(depth(above, rank) for rank in above) <= (ranks - 1).bit_length()
        inner = [{upper for upper, _ in of_tree(ranks, number)} - {0} for number in (0, 1)]
        assert not inner[0] & inner[1]


def test_edges_that_meet_have_two_colours():
    for ranks in RANKS:
        between = double_tree.edges(ranks)
        colour = double_tree.colours(between)
        for one, other in combinations(range(len(colour)), 2):
            if between.upper[one] == between.upper[other] or between.lower[one] == between.lower[other]:
                assert colour[one] != colour[other]


def test_no_rank_sends_or_receives_two_messages_in_a_round_of_a_double_tree():
    for ranks in RANKS:
        for transfers in double_tree.broadcast(ranks, chunks=3).rounds:
            assert max(Counter(one.source for one in transfers).values()) == 1
            assert max(Counter(one.target for one in transfers).values()) == 1
        for chunks in (1, 5):
            most = 2 * chunks + 2 * (ranks - 1).bit_length() - 2
            assert most - 1 <= len(double_tree.broadcast(ranks, chunks=chunks).rounds) <= most


# --- servers, hierarchies, tori ---------------------------------------------------------------------


def test_four_ranks_push_to_two_servers_and_pull_from_them():
    push, pull = server.all_reduce(4, servers=2).rounds
    assert {(one.source, one.target, one.begin) for one in push if one.adds} == {
        *((rank, 0, 0) for rank in (1, 2, 3)),
        *((rank, 2, 1) for rank in (0, 1, 3)),
    }
    assert {(one.target, one.source, one.begin) for one in pull} == {
        (one.source, one.target, one.begin) for one in push
    }
    for servers, homes in ((1, [0]), (2, [0, 4]), (3, [0, 2, 5]), (8, list(range(8)))):
        assert sorted({one.target for one in server.all_reduce(8, servers).rounds[0]}) == homes


def crossing(plan, local):
    return [one for transfers in plan.rounds for one in transfers if one.source // local != one.target // local]


def test_two_hosts_of_three_reduce_inside_cross_and_gather_inside():
    plan = hierarchical.all_reduce(6, local=3)
    distances = [{abs(one.source // 3 - one.target // 3) for one in transfers} for transfers in plan.rounds]
    assert distances == [{0}, {0}, {1}, {1}, {0}, {0}]
    for one in crossing(hierarchical.all_reduce(12, local=4), 4):  # with its own chunk, to its peers only
        assert one.source % 4 == one.target % 4
        assert one.begin // 3 == one.source % 4
    broadcast = hierarchical.broadcast(12, local=4, root=6)
    assert len(crossing(broadcast, 4)) == 2
    assert {one.source for one in broadcast.rounds[0]} == {6}


@pytest.mark.parametrize("across", [halving.all_reduce, doubling.all_reduce, tree.all_reduce])
def test_any_all_reduce_may_go_between_the_hosts(across):
    plan = hierarchical.all_reduce(15, local=3, across=across)
    assert across(5).name in plan.name
    assert prove(plan).identical


def step(one, rows, columns):
    """(rows down, columns right) of a transfer, round the edges: a neighbour is one step from here."""
    down = (one.target // columns - one.source // columns) % rows
    right = (one.target % columns - one.source % columns) % columns
    return (down if down <= rows // 2 else down - rows, right if right <= columns // 2 else right - columns)


def test_every_message_of_a_torus_goes_to_a_neighbour_rows_before_columns_and_after_them():
    for parts in (1, 2, 4):
        for one in (one for transfers in torus.all_reduce(5, 7, parts).rounds for one in transfers):
            assert sorted(map(abs, step(one, 5, 7))) == [0, 1]
    ways = [{step(one, 3, 4) for one in transfers} for transfers in torus.all_reduce(3, 4).rounds]
    assert ways == [{(0, 1)}] * 3 + [{(1, 0)}] * 4 + [{(0, 1)}] * 3


def test_four_parts_use_all_four_directions_of_every_rank_in_every_round():
    for transfers in torus.all_reduce(4, 4, parts=4).rounds:
        used = {(one.source, step(one, 4, 4)) for one in transfers}
        assert len(used) == len(transfers) == 4 * 16


# --- rounds made of rounds --------------------------------------------------------------------------


def transfers(rounds, ranks=12, blocks=50):
    return Plan("mine", "all_reduce", ranks, blocks, lambda: rounds).rounds


def test_a_broadcast_backwards_is_a_reduce_to_the_same_root():
    for ranks in (1, 2, 3, 6, 8):
        spread = tree.broadcast(ranks, root=ranks - 1)
        prove(Plan("backwards", "reduce", ranks, 1, lambda plan=spread: reverse(plan.make_rounds()), root=ranks - 1))


def test_ranks_and_blocks_are_renamed_in_every_group():
    (moved,) = transfers(remap([send([0], [1], 1, 2, adds=True)], [[4, 7], [5, 8]], offset=[10, 20], scale=3))
    assert moved == (Transfer(4, 7, 13, 19, True), Transfer(5, 8, 23, 29, True))


def test_plans_in_parallel_keep_their_rounds_and_the_longer_goes_on_alone():
    short, long = [send([0], [1])], [send([2], [3]), send([3], [2], 1)]
    first, second = transfers(in_parallel([short, long]))
    assert first == (Transfer(0, 1, 0, 1), Transfer(2, 3, 0, 1))
    assert second == (Transfer(3, 2, 1, 2),)


def test_a_root_takes_the_part_of_rank_0():
    assert transfers(with_root([send([0], [2])], ranks=3, root=2)) == ((Transfer(2, 1, 0, 1),),)


@pytest.mark.parametrize(
    ("ranks", "members", "idle"),
    [(1, [0], []), (4, [0, 1, 2, 3], []), (5, [0, 2, 3, 4], [1]), (7, [0, 2, 4, 6], [1, 3, 5])],
)
def test_a_fold_leaves_a_power_of_two(ranks, members, idle):
    assert [each.tolist() for each in fold(ranks)] == [members, idle]


def test_a_power_of_two_needs_no_round_to_fold():
    assert [*gather_idle(fold(8)[1]), *scatter_idle(fold(8)[1])] == []
