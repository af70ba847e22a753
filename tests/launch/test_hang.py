"""What holds a run up, told from how its ranks are; without ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from samestep.launch.monitor.hang import describe_hang, diagnose, is_doubtful, limit
from samestep.launch.monitor.heartbeat import RankHeartbeat

WAITS = RankHeartbeat(
    rank=0,
    pid=70,
    step=30,
    since_progress=12.0,
    since_activity=12.0,
    state="S",
    entered=61,
    operation="all_reduce",
    site="train.py:20",
    phase="",
    p99_step=0.2,
)
ASLEEP = replace(WAITS, rank=1, pid=71, entered=60, operation="", site="")
COMPUTES = replace(ASLEEP, since_activity=0.4, state="R")
FROZEN = replace(ASLEEP, state="T")


@pytest.mark.parametrize(
    ("others", "kind", "culprits", "certain"),
    [
        ([COMPUTES], "busy", (1,), False),
        ([ASLEEP], "asleep", (1,), False),
        ([FROZEN], "frozen", (1,), False),
        ([replace(ASLEEP, state="D")], "disk", (1,), False),
        ([replace(ASLEEP, state="D", phase="save")], "disk", (1,), False),
        ([replace(WAITS, rank=1, operation="barrier")], "mismatch", (0, 1), True),
        ([replace(WAITS, rank=1, entered=60)], "mismatch", (1,), True),
        ([replace(WAITS, rank=1, entered=62, operation="barrier")], "mismatch", (0,), True),
        ([replace(WAITS, rank=1)], "lost", (0, 1), False),
        ([replace(FROZEN, step=0), replace(WAITS, rank=2, step=0)], "frozen", (1,), False),
        ([COMPUTES, replace(ASLEEP, rank=2)], "busy", (1,), False),
        ([replace(ASLEEP, phase="evaluate", since_progress=70.0, since_activity=70.0)], "asleep", (1,), False),
    ],
)
def test_who_holds_a_run_up(others: list[RankHeartbeat], kind: str, culprits: tuple[int, ...], certain: bool) -> None:
    found = diagnose([WAITS, *others])
    assert found is not None
    assert (found.kind, found.culprits, found.since_progress, found.certain) == (kind, culprits, 12.0, certain)


def test_ranks_that_all_compute_are_told_apart_by_the_flight_recorder() -> None:
    """Kernels of NCCL that wait look like work."""
    both = [replace(COMPUTES, rank=0), COMPUTES]
    assert diagnose(both) is None
    assert is_doubtful(both)
    found = diagnose(both, behind=[1])
    assert found is not None
    assert (found.kind, found.culprits, found.certain) == ("busy", (1,), False)
    assert not is_doubtful([replace(both[0], since_progress=9.0), both[1]])
    assert not is_doubtful([WAITS, COMPUTES])
    assert not is_doubtful([])


@pytest.mark.parametrize(
    ("others", "missing", "culprits"),
    [
        ([COMPUTES, replace(COMPUTES, rank=2)], (2,), (2,)),
        ([ASLEEP, replace(ASLEEP, rank=2)], (1,), (1,)),
        ([FROZEN, replace(ASLEEP, rank=2)], (2,), (1,)),  # the kernel knows better
        ([COMPUTES], (1,), (1,)),
        ([COMPUTES, replace(COMPUTES, rank=2)], (0,), (1, 2)),  # not one of them: not enough to acquit them
    ],
)
def test_the_flight_recorder_tells_apart_whom_the_pulses_do_not(
    others: list[RankHeartbeat], missing: tuple[int, ...], culprits: tuple[int, ...]
) -> None:
    found = diagnose([WAITS, *others], behind=missing)
    assert found is not None
    assert found.culprits == culprits


@pytest.mark.parametrize(
    "pulses",
    [
        [],
        [WAITS, replace(ASLEEP, since_progress=9.0)],  # it has moved
        [WAITS, replace(COMPUTES, p99_step=3.0)],  # 12 s are less than 5 of its steps
        [replace(WAITS, step=1), replace(COMPUTES, step=1)],  # compiles
        [replace(WAITS, step=0), replace(ASLEEP, step=0)],  # downloads
        [WAITS, replace(COMPUTES, phase="evaluate")],
        [WAITS, replace(ASLEEP, phase="save")],
        [WAITS, replace(COMPUTES, phase="save", state="D")],
        [COMPUTES, replace(COMPUTES, rank=0)],  # nobody waits
        [COMPUTES],
        [WAITS, replace(WAITS, rank=1, operation="barrier", since_activity=0.5)],  # messages are made
    ],
)
def test_long_work_is_no_hang(pulses: list[RankHeartbeat]) -> None:
    assert diagnose(pulses) is None


@pytest.mark.parametrize("rank", [COMPUTES, ASLEEP])
def test_what_others_wait_for_before_the_second_step_is_told_late_and_may_be_right(rank: RankHeartbeat) -> None:
    early = [replace(pulse, step=1, since_progress=61.0) for pulse in (WAITS, rank)]
    found = diagnose(early)
    assert found is not None
    assert (found.culprits, found.certain, found.early) == ((1,), False, True)
    assert diagnose([replace(early[1], rank=number) for number in (0, 1)]) is None  # nobody waits
    assert not [each for each in (diagnose([WAITS, rank]), diagnose([early[0], FROZEN])) if each is None or each.early]


def test_without_a_collective_that_shows_the_rank_behind_holds_the_others_up() -> None:
    asleep = [replace(ASLEEP, rank=rank, step=30 - (rank == 2)) for rank in range(4)]
    found = diagnose(asleep)
    assert found is not None
    assert (found.kind, found.culprits) == ("asleep", (2,))
    alone = diagnose([ASLEEP])
    assert alone is not None
    assert alone.culprits == (1,)


def test_the_patience_is_that_of_the_longest_steps() -> None:
    assert limit([WAITS]) == 10.0
    assert limit([WAITS, replace(ASLEEP, p99_step=7.0)]) == 35.0
    assert limit([WAITS], 2.5) == 2.5


def test_it_is_told_who_is_stuck_where_and_what_the_others_wait_in() -> None:
    pulses = {pulse.rank: pulse for pulse in (WAITS, COMPUTES, replace(WAITS, rank=2))}
    found = diagnose(list(pulses.values()))
    assert found is not None
    assert describe_hang(found, pulses, {1: "train.py:14  while True:", 0: "train.py:20  dist.all_reduce(x)"}) == [
        "no progress for 12 s: rank 1 is computing but does not finish a step; ranks 0, 2 are waiting for it",
        "    rank 1 computing at train.py:14  while True:  (after step 30)",
        "    rank 0 in all_reduce, collective 61 at train.py:20  dist.all_reduce(x)  (after step 30)",
        "    rank 2 in all_reduce, collective 61 at train.py:20  (after step 30)",
    ]


def test_a_frozen_rank_is_told_how_to_let_it_go_on() -> None:
    pulses = {0: WAITS, 1: FROZEN}
    found = diagnose(list(pulses.values()))
    assert found is not None
    assert describe_hang(found, pulses, {})[1] == (
        "    rank 1 frozen, process 71: kill -CONT 71 lets it go on  (after step 30)"
    )
    assert describe_hang(found, pulses, {}, {0: "node1", 1: "node2"})[1] == (
        "    rank 1 frozen, process 71 on node2: kill -CONT 71 on node2 lets it go on  (after step 30)"
    )
