"""What the flight recorder adds to an explanation: who has not begun what others wait in."""

from __future__ import annotations

from typing import Any

import pytest

from samestep.launch.monitor.flight_recorder import CollectiveRecord, ranks_behind, recorder_lines


def flight(rank: int, number: int, *, done: bool, group: str = "0 default_pg") -> CollectiveRecord:
    return CollectiveRecord(rank=rank, group=group, number=number, operation="all_reduce", sizes="[20]", done=done)


@pytest.mark.parametrize(
    ("flights", "behind"),
    [
        ([flight(0, 41, done=False), flight(1, 40, done=True)], (1,)),
        ([flight(0, 41, done=False), flight(1, 41, done=False)], ()),  # both wait: messages, or two collectives
        ([flight(0, 41, done=True), flight(1, 40, done=True)], ()),  # one is on its way to the next
        ([flight(0, 3, done=True), flight(1, 3, done=True), flight(1, 9, done=False, group="1")], ()),  # its own group
        ([flight(0, 9, done=False), flight(1, 7, done=True), flight(2, 8, done=True)], (1, 2)),
        ([], ()),
    ],
)
def test_a_rank_is_missing_that_has_begun_fewer_than_one_that_waits(
    flights: list[CollectiveRecord], behind: tuple[int, ...]
) -> None:
    assert ranks_behind(flights) == behind


def test_groups_in_which_all_is_done_are_not_told() -> None:
    quiet = [flight(0, 3, done=True, group="1 tensor"), flight(1, 3, done=True, group="1 tensor")]
    (told,) = recorder_lines([*quiet, flight(0, 41, done=False), flight(1, 40, done=True)])
    waits, behind = told.removeprefix("flight recorder, group 0 default_pg: ").split("; ")
    assert waits == "rank 0 collective 41, all_reduce of [20], not done"
    assert behind == "rank 1 collective 40, all_reduce of [20], done"


def last() -> list[dict[str, Any]]:
    import torch
    import torch.distributed as dist

    from samestep.launch.monitor.flight_recorder import last_collectives

    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(20))
    while not (found := last_collectives())[-1]["done"]:  # gloo's own thread notes that a moment later
        pass
    dist.destroy_process_group()
    return found


def test_a_real_recorder_knows_the_last_collective_of_a_group(two_ranks: Any) -> None:
    for found in two_ranks(last):  # groups of earlier tests in the same processes stand before this one
        told = found[-1]
        assert (told["operation"], told["sizes"], told["done"]) == ("all_reduce", "[20]", True)
        assert told["number"] >= 1
