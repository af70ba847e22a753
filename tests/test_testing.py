"""Ranks that stay alive, and comparisons to the bit."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from samestep.errors import RankFailure
from samestep.testing import assert_same_bits, largest_difference, run_ranks


def total(value):
    dist.init_process_group("gloo")
    number = torch.tensor([value + dist.get_rank()])
    dist.all_reduce(number)
    dist.destroy_process_group()
    return int(number)


def total_that_leaves_its_group_behind():
    dist.init_process_group("gloo")
    number = torch.ones(1)
    dist.all_reduce(number)
    return int(number)


def place():
    return {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS")}


def pid():
    return os.getpid()


def stain():
    os.environ["SAMESTEP_STAIN"] = "1"
    torch.set_default_dtype(torch.float64)


def is_clean():
    return "SAMESTEP_STAIN" not in os.environ and torch.get_default_dtype() == torch.float32


def fail_on_rank_one():
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        raise KeyError("no such label")
    dist.all_reduce(torch.ones(1))


def exit_on_rank_one():
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        os._exit(9)
    dist.all_reduce(torch.ones(1))


def return_early_on_rank_one():
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))


def wait_for_rank_one_for_ever():
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))
    while True:
        time.sleep(1)


def test_ranks_talk_to_each_other_and_answer_in_rank_order(three_ranks):
    assert three_ranks(total, 5) == [18, 18, 18]
    assert [rank["RANK"] for rank in three_ranks(place)] == ["0", "1", "2"]


def test_ranks_stay_alive_between_calls(two_ranks):
    assert two_ranks(pid) == two_ranks(pid)


def test_every_call_has_a_rendezvous_of_its_own(two_ranks):
    assert [two_ranks(total, i) for i in range(5)] == [[2 * i + 1] * 2 for i in range(5)]


def test_a_group_left_behind_does_not_reach_the_next_call(two_ranks):
    assert two_ranks(total_that_leaves_its_group_behind) == [2, 2]
    assert two_ranks(total_that_leaves_its_group_behind) == [2, 2]


def test_a_call_starts_with_the_defaults(two_ranks):
    two_ranks(stain)
    assert two_ranks(is_clean) == [True, True]


def test_a_closure_can_be_sent(two_ranks):
    factor = 3
    assert two_ranks(lambda value: factor * value, 2) == [6, 6]


def test_the_rank_that_raised_is_blamed_with_its_line_and_the_set_recovers(two_ranks):
    before = two_ranks(pid)
    with pytest.raises(RankFailure, match="no such label") as failure:
        two_ranks(fail_on_rank_one)
    assert failure.value.rank == 1
    assert "raise KeyError" in str(failure.value)
    assert "test_testing.py" in str(failure.value)
    assert set(two_ranks(pid)).isdisjoint(before)


def test_the_rank_that_died_is_blamed_and_not_its_victim(two_ranks):
    with pytest.raises(RankFailure, match="exited with code 9") as failure:
        two_ranks(exit_on_rank_one)
    assert (failure.value.rank, failure.value.exit_code) == (1, 9)


def test_the_rank_that_returned_early_is_blamed(two_ranks):
    with pytest.raises(RankFailure, match="still waited for it") as failure:
        two_ranks(return_early_on_rank_one)
    assert (failure.value.rank, failure.value.exit_code) == (1, 1)


def test_a_hang_shows_where_every_rank_stood(two_ranks):
    two_ranks(pid)  # started
    with pytest.raises(RankFailure, match="gave no answer within 3 s") as failure:
        two_ranks(wait_for_rank_one_for_ever, timeout=3)
    assert "in all_reduce" in str(failure.value)
    assert "in wait_for_rank_one_for_ever" in str(failure.value)


@pytest.mark.prove
def test_run_ranks_starts_fresh_processes():
    assert run_ranks(total, 2, 1) == [3, 3]


def test_equal_bits_pass_at_any_depth():
    value = {"a": [torch.tensor([1.0, float("nan")]), (2, "x")], "b": torch.zeros(0, 3)}
    assert_same_bits(value, {"a": [torch.tensor([1.0, float("nan")]), (2, "x")], "b": torch.zeros(0, 3)})


@pytest.mark.parametrize(
    ("actual", "expected", "message"),
    [
        ({"w": torch.zeros(2, 2)}, {"w": torch.tensor([[0.0, 0.0], [1.0, 0.0]])}, r"value\['w'\]\[1, 0\]: 0.0 is"),
        ([torch.tensor(0.0)], [torch.tensor(-0.0)], r"value\[0\]: 0.0 is not -0.0"),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64), "torch.float32 is not torch.float64"),
        (torch.zeros(2), torch.zeros(3), r"shape \(2,\) is not \(3,\)"),
        ({"a": 1}, {"b": 1}, r"keys differ: \['a', 'b'\]"),
        ([1], [1, 2], "1 items are not 2"),
        ([1], [1.0], "a int is not a float"),
    ],
)
def test_the_first_difference_is_named(actual, expected, message):
    with pytest.raises(AssertionError, match=message):
        assert_same_bits(actual, expected)


def test_equal_infinities_do_not_differ():
    endless = torch.tensor([float("inf"), 1.0])
    assert largest_difference(endless, endless) == 0
    assert largest_difference(endless, -endless) == float("inf")


def test_imaginary_parts_count_in_the_largest_difference():
    assert largest_difference(torch.tensor([1 + 3j]), torch.tensor([1 - 1j])) == 4


def test_the_largest_difference_is_found_and_nan_is_never_small():
    assert largest_difference({"a": torch.zeros(2), "b": 1.0}, {"a": torch.tensor([0.0, -0.5]), "b": 1.25}) == 0.5
    nan = largest_difference([torch.tensor(float("nan"))], [torch.tensor(0.0)])
    assert nan != nan  # noqa: PLR0124
