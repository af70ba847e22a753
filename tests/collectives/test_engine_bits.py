"""The engine on simulated ranks: exact on whole numbers, and bit for bit what the simplest execution gives."""

from __future__ import annotations

import pytest
import torch
from every_plan import FAMILIES, every_plan, expected, inputs
from wire import Wire, run_engine, simulated

from samestep.collectives import ring, simulate
from samestep.collectives.plan import Plan, Transfer
from samestep.collectives.proof import prove
from samestep.errors import UsageError
from samestep.testing import assert_same_bits

SIZES = [0, 1, 7, 1003]


def check_exact(plan, elements, late):
    buffers = inputs(plan, elements)
    ends = [buffer.clone() for buffer in buffers]
    run_engine(plan, ends, late=late)
    for rank, (where, what) in enumerate(expected(plan, buffers)):
        assert torch.equal(ends[rank][where], what), (plan.name, plan.operation, plan.ranks, elements, rank)


@pytest.mark.parametrize("family", FAMILIES)
def test_sums_are_exact(family):
    for turn, ranks in enumerate([*range(1, 8), 12, 13, 16, 33]):
        for number, plan in enumerate(FAMILIES[family](ranks)):
            sizes = (*SIZES, ranks - 1, ranks) if ranks < 5 else (SIZES[(turn + number) % len(SIZES)],)
            for elements in sizes:
                check_exact(plan, elements, late=(turn + number + elements) % 2 == 0)


@pytest.mark.prove
@pytest.mark.parametrize("family", FAMILIES)
def test_sums_are_exact_for_every_number_of_ranks(family):
    for ranks in range(1, 65):
        for plan in FAMILIES[family](ranks):
            for elements in (*SIZES, ranks - 1):
                check_exact(plan, elements, late=elements % 2 == 0)


@pytest.mark.parametrize("late", [True, False], ids=["late", "early"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ranks", [3, 4, 6, 13])
def test_the_engine_gives_the_bits_of_the_simplest_execution(ranks, dtype, late):
    for plan in every_plan(ranks):
        buffers = inputs(plan, 101, dtype)
        results = simulated(plan, buffers)
        run_engine(plan, buffers, late=late)
        assert_same_bits(buffers, results, plan.name)


@pytest.mark.parametrize("ranks", [3, 6, 8])
def test_all_ranks_end_with_the_same_bits_as_was_proved(ranks):
    for plan in every_plan(ranks):
        if plan.operation == "all_reduce":
            ends = simulated(plan, inputs(plan, 1003, torch.float32))
            assert_same_bits(ends, [ends[0]] * ranks, plan.name)


def test_numbers_show_the_difference_that_was_proved():
    pairs = [(one, other) for one in range(4) for other in range(4) if one != other]
    flat = Plan.from_transfers("flat", "all_reduce", 4, 1, (tuple(Transfer(*pair, 0, 1, True) for pair in pairs),))
    assert not prove(flat).identical
    ends = simulated(flat, inputs(flat, 1003, torch.float32))
    assert not torch.equal(ends[0], ends[3])
    assert torch.allclose(ends[0], ends[3])


def test_elements_that_are_added_in_one_order_have_the_same_bits_in_any_place():
    for plan in every_plan(8):
        if plan.operation == "all_reduce" and prove(plan).position_independent:
            ends = simulated(plan, [number.expand(64) for number in inputs(plan, 1, torch.float32)])[0]
            assert_same_bits(ends, ends[:1].expand(64), plan.name)


@pytest.mark.parametrize("late", [True, False], ids=["late", "early"])
def test_what_is_replaced_was_added_before(late):
    plan = Plan.from_transfers("mine", "broadcast", 2, 1, ((Transfer(0, 1, 0, 1, True),), (Transfer(0, 1, 0, 1),)))
    buffers = [torch.tensor([1]), torch.tensor([10])]
    run_engine(plan, buffers, late=late)
    assert buffers == [1, 1]


def pass_on(late):
    """Sends a 1 that becomes a 2 on its way; returns what is there before and after waiting for it."""
    wire = Wire(late=late)
    out, into = torch.tensor([1]), torch.tensor([0])
    wire.end(0, 2).isend(out, target=1, tag=5)
    out.add_(1)
    message = wire.end(1, 2).irecv(into, source=0, tag=5)
    before = into.item()
    message.wait()
    return before, into.item()


def test_early_links_take_a_message_at_once_and_late_ones_when_it_is_waited_for():
    assert pass_on(late=False) == (1, 1)
    assert pass_on(late=True) == (0, 2)


def test_a_simulation_takes_one_buffer_a_rank_of_the_same_kind():
    with pytest.raises(UsageError, match="over 3 ranks, and here are 2 buffers"):
        simulate.run(ring.all_reduce(3), [torch.ones(2)] * 2)
    with pytest.raises(UsageError, match="differ in dtype or shape"):
        simulate.run(ring.all_reduce(2), [torch.ones(2), torch.ones(3)])
    with pytest.raises(UsageError, match="differ in dtype or shape"):
        simulate.run(ring.all_reduce(2), [torch.ones(2), torch.ones(2, dtype=torch.float64)])
