"""The proof of every plan over many numbers of ranks, and plans that are wrong in every way there is."""

from __future__ import annotations

from pathlib import Path

import pytest
from every_plan import FAMILIES, every_plan

from samestep.collectives import doubling, halving, hierarchical, ring, segmented, server, tree
from samestep.collectives.plan import Plan, Transfer
from samestep.collectives.proof import SumExpr, prove
from samestep.errors import UsageError
from samestep.topology import tree_sum


def assert_same_bits_on_all_ranks(family, numbers):
    for ranks in numbers:
        for plan in FAMILIES[family](ranks):
            assert prove(plan).identical, (plan.name, plan.operation, ranks)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_plan_computes_what_it_says_and_leaves_the_same_bits_on_all_ranks(family):
    assert_same_bits_on_all_ranks(family, [*range(1, 18), 24, 31, 32, 33, 64])


@pytest.mark.prove
@pytest.mark.parametrize("family", FAMILIES)
def test_every_plan_does_so_for_every_number_of_ranks_up_to_128(family):
    assert_same_bits_on_all_ranks(family, range(18, 129))


@pytest.mark.parametrize("family", FAMILIES)
def test_no_plan_has_a_transfer_that_could_be_left_out(family):
    for ranks in (2, 3, 5, 6):
        for plan in FAMILIES[family](ranks):
            for number, transfers in enumerate(plan.rounds):
                for one in transfers:
                    fewer = tuple(other for other in transfers if other is not one)
                    rounds = (*plan.rounds[:number], fewer, *plan.rounds[number + 1 :])
                    with pytest.raises(UsageError):
                        prove(Plan.from_transfers(plan.name, plan.operation, ranks, plan.blocks, rounds, plan.root))


def test_addition_commutes_and_does_not_associate():
    a, b, c = (SumExpr.of_rank(rank, "test") for rank in range(3))
    assert a + b == b + a
    assert (a + b) + c == c + (b + a)
    assert (a + b) + c != a + (b + c)


def test_brackets_are_written_from_the_lowest_rank_on():
    a, b, c, d = (SumExpr.of_rank(rank, "test") for rank in range(4))
    assert str((d + b) + (c + a)) == "((0+2)+(1+3))"


def everybody_to_everybody(ranks):
    """One round, in which each adds the others to its own: right, but bracketed by each in its own way."""
    pairs = ((one, other) for one in range(ranks) for other in range(ranks) if one != other)
    return (tuple(Transfer(one, other, 0, 1, True) for one, other in pairs),)


def test_ranks_that_add_in_orders_of_their_own_end_with_different_bits():
    assert prove(Plan.from_transfers("flat", "all_reduce", 2, 1, everybody_to_everybody(2))).identical
    proof = prove(Plan.from_transfers("flat", "all_reduce", 3, 1, everybody_to_everybody(3)))
    assert not proof.identical
    assert proof.position_independent  # every rank treats all its elements alike


def test_a_proof_tells_blocks_apart_that_are_added_in_other_orders():
    proof = prove(ring.all_reduce(4))
    assert not proof.position_independent
    assert len(set(map(str, proof.sums))) == 4


def test_halving_doubling_and_trees_add_as_virtual_ranks_are_added_for_powers_of_two():
    for ranks in (1, 2, 4, 8, 16, 32, 64):
        order = str(tree_sum([SumExpr.of_rank(rank, "expected") for rank in range(ranks)]))
        for plan in (halving.all_reduce(ranks), doubling.all_reduce(ranks), tree.all_reduce(ranks)):
            assert {str(each) for each in prove(plan).sums} == {order}


def test_a_tree_adds_so_for_any_number_of_ranks():
    for ranks in range(1, 65):
        order = str(tree_sum([SumExpr.of_rank(rank, "expected") for rank in range(ranks)]))
        assert str(prove(tree.all_reduce(ranks)).sums[0]) == order


def test_halving_and_doubling_add_alike_for_any_number_of_ranks():
    for ranks in range(1, 65):
        (one,), others = prove(doubling.all_reduce(ranks)).sums, prove(halving.all_reduce(ranks)).sums
        assert {str(other) for other in others} == {str(one)}


def test_what_is_added_twice_is_named():
    twice = ((Transfer(0, 1, 0, 1, True),), (Transfer(0, 1, 0, 1, True),))
    with pytest.raises(UsageError, match=r"mine: what rank 0 brought is added twice: \(0\+1\) and 0"):
        prove(Plan.from_transfers("mine", "reduce", 2, 1, twice, root=1))


@pytest.mark.parametrize(
    ("operation", "rounds", "problem"),
    [
        ("all_reduce", (), r"rank 0 ends with 0 in block 0, not with the sum over all 2 ranks"),
        ("all_reduce", ((Transfer(0, 1, 0, 2, True),),), "rank 0 ends with 0 in block 0"),
        ("reduce_scatter", ((Transfer(0, 1, 1, 2, True),),), "rank 0 ends with 0 in block 0"),
        ("all_gather", ((Transfer(0, 1, 0, 1),),), "in block 1, not with that of rank 1"),
        ("broadcast", ((Transfer(0, 1, 0, 1),),), "rank 1 ends with 3 in block 1, not with that of rank 0"),
        ("reduce", ((Transfer(1, 0, 0, 1, True),),), "rank 0 ends with 0 in block 1"),
    ],
)
def test_what_is_missing_is_named(operation, rounds, problem):
    with pytest.raises(UsageError, match=problem):
        prove(Plan.from_transfers("mine", operation, 2, 2, rounds))


def test_one_rank_needs_nothing_for_any_operation():
    for plan in every_plan(1):
        assert plan.rounds == ()
        assert prove(plan).identical


def test_the_document_shows_the_orders_that_were_proved():
    text = (Path(__file__).parents[2] / "docs" / "all-reduce.md").read_text("utf-8")
    for plan in (
        doubling.all_reduce(8),
        server.all_reduce(8),
        ring.all_reduce(8),
        hierarchical.all_reduce(8, 4),
        halving.reduce_scatter(8),
        segmented.reduce(8),
    ):
        assert f" {prove(plan).sums[0]} " in text, plan.name
