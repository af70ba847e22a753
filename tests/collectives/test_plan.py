"""What a plan is: its rules, its shares, and the plainest way to carry it out."""

from __future__ import annotations

from itertools import pairwise

import pytest
from every_plan import every_plan

from samestep.collectives.plan import Plan, Transfer, execute
from samestep.errors import UsageError


def make(*rounds, ranks=3, blocks=4, operation="all_reduce", root=0):
    return Plan.from_transfers("mine", operation, ranks, blocks, rounds, root)


def test_what_is_sent_is_what_was_there_when_the_round_began():
    passed_on = make((Transfer(0, 1, 0, 1, True), Transfer(1, 2, 0, 1)), blocks=1)
    assert execute(passed_on, [["a"], ["b"], ["c"]]) == [["a"], ["ba"], ["b"]]


def test_what_is_added_is_added_in_the_order_of_its_sources_whatever_the_order_of_the_plan():
    forwards = (Transfer(0, 1, 0, 1, True), Transfer(2, 1, 0, 1, True))
    for transfers in (forwards, forwards[::-1]):
        assert execute(make(transfers, blocks=1), [["a"], ["b"], ["c"]])[1] == ["bac"]


def test_only_the_blocks_of_a_transfer_change():
    ends = execute(make((Transfer(0, 1, 1, 3, True),)), ["abcd", "efgh", "ijkl"])
    assert ["".join(row) for row in ends] == ["abcd", "efbgch", "ijkl"]


def test_the_inputs_stay_as_they_are():
    values = [["a"], ["b"], ["c"]]
    execute(make((Transfer(0, 1, 0, 1),), blocks=1), values)
    assert values == [["a"], ["b"], ["c"]]


def test_a_rank_knows_what_it_sends_and_receives_in_each_round():
    plan = make((Transfer(2, 1, 0, 1, True), Transfer(0, 1, 0, 1, True)), (Transfer(1, 0, 2, 4),))
    sends, receives = zip(*plan.of_rank(1), strict=True)
    assert sends == ((), (Transfer(1, 0, 2, 4),))
    assert receives == ((Transfer(0, 1, 0, 1, True), Transfer(2, 1, 0, 1, True)), ())


@pytest.mark.parametrize("elements", [0, 1, 3, 4, 5, 1003])
def test_blocks_cover_a_buffer_evenly(elements):
    edges = make().edges(elements)
    lengths = [end - begin for begin, end in pairwise(edges)]
    assert edges[0] == 0
    assert edges[-1] == elements
    assert len(lengths) == 4
    assert max(lengths) - min(lengths) <= 1


def test_each_rank_holds_its_share_of_a_reduce_scatter_and_the_root_all_of_a_reduce():
    assert [list(make(blocks=6, operation="reduce_scatter").held(rank)) for rank in range(3)] == [
        [0, 1],
        [2, 3],
        [4, 5],
    ]
    assert [len(make(operation="reduce", root=1).held(rank)) for rank in range(3)] == [0, 4, 0]
    assert [len(make(operation="broadcast").held(rank)) for rank in range(3)] == [4, 4, 4]


@pytest.mark.parametrize(
    "transfers",
    [
        pytest.param([Transfer(1, 1, 0, 1)], id="to itself"),
        pytest.param([Transfer(0, 3, 0, 1)], id="to nobody"),
        pytest.param([Transfer(-1, 0, 0, 1)], id="from nobody"),
        pytest.param([Transfer(0, 1, 2, 2)], id="nothing"),
        pytest.param([Transfer(0, 1, 3, 5)], id="past the end"),
        pytest.param([Transfer(0, 1, 0, 2), Transfer(2, 1, 1, 3)], id="replaced twice"),
        pytest.param([Transfer(0, 1, 0, 2), Transfer(2, 1, 1, 3, True)], id="replaced and added to"),
        pytest.param([Transfer(0, 1, 1, 3, True), Transfer(2, 1, 0, 2)], id="added to and replaced"),
        pytest.param([Transfer(0, 1, 0, 2, True), Transfer(0, 1, 1, 3, True)], id="added twice from one rank"),
        pytest.param([Transfer(0, 1, 0, 1), Transfer(1, 2, 0, 1)], id="replaced while it is sent"),
        pytest.param(
            [Transfer(0, 1, 0, 4, True), Transfer(2, 1, 0, 1, True), Transfer(2, 1, 3, 4)],
            id="a long one over a short one",
        ),
    ],
)
def test_a_round_that_could_mean_two_things_is_refused(transfers):
    with pytest.raises(UsageError, match="mine, round 1: "):
        make((), tuple(transfers))


def test_adding_from_several_ranks_to_one_block_is_no_clash():
    make((Transfer(0, 1, 0, 4, True), Transfer(2, 1, 0, 4, True), Transfer(1, 2, 0, 2, True)))


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"ranks": 0}, "over 0 ranks: give 1 or more"),
        ({"root": 3}, "rank 3 cannot be the root of 3 ranks"),
        ({"root": -1}, "rank -1 cannot be the root"),
        ({"blocks": 0}, "cut into 0 blocks"),
        ({"operation": "all_to_all"}, "no operation 'all_to_all'"),
        ({"operation": "all_gather", "blocks": 4}, "4 blocks are not the same number for each of 3 ranks"),
    ],
    ids=str,
)
def test_an_impossible_plan_is_refused(arguments, problem):
    with pytest.raises(UsageError, match=problem):
        make(**arguments)


@pytest.mark.parametrize("ranks", [1, 2, 5, 8, 12])
def test_no_plan_has_an_empty_round(ranks):
    for plan in every_plan(ranks):
        assert all(plan.rounds), plan.name
