"""What the head does about a run that may hang: whom it asks, and what it says; without ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest

from samestep.launch.event_loop import Loop
from samestep.launch.monitor import watchdog
from samestep.launch.monitor.flight_recorder import CollectiveRecord
from samestep.launch.monitor.heartbeat import RankHeartbeat
from samestep.launch.monitor.watchdog import Watchdog


def computing(rank: int) -> RankHeartbeat:
    """A rank that has computed for 12 seconds, and not come to the end of a step."""
    where = {"operation": "", "site": "", "phase": "train", "entered": 3}
    return RankHeartbeat(
        rank=rank, pid=70 + rank, step=30, since_progress=12.0, since_activity=0.1, state="R", p99_step=0.2, **where
    )


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PERIOD_S", "STACKS_S", "SETTLED_S"):
        monkeypatch.setattr(watchdog, name, 0.01)


def watched(flights: Sequence[CollectiveRecord]) -> tuple[list[str], list[Any]]:
    """Returns what was said of two ranks that compute, and the orders that they got; their recorders know `flights`."""
    loop, said, orders = Loop(), [], []

    def order(what: str, ranks: Sequence[int]) -> None:
        orders.append((what, list(ranks)))
        if what == "flight":
            for flight in flights:
                fields = {name: value for name, value in asdict(flight).items() if name != "rank"}
                watch.on_message("node1", "flight", {"rank": flight.rank, "collectives": [fields]})

    def say(text: str) -> None:
        said.append(text)
        loop.stop()

    watch = Watchdog(loop, lambda: [0, 1], order, say, lambda _: None, {})
    for rank in (0, 1):
        watch.on_message("node1", "heartbeat", asdict(computing(rank)))
    loop.at(0.5, loop.stop)
    loop.run()
    watch.close()
    return said, orders


def flight(rank: int, number: int, *, done: bool) -> CollectiveRecord:
    return CollectiveRecord(
        rank=rank, group="0 default_pg", number=number, operation="all_reduce", sizes="[20]", done=done
    )


@pytest.mark.usefixtures("at_once")
def test_a_rank_for_which_others_wait_in_a_kernel_is_found_by_the_flight_recorders() -> None:
    said, orders = watched([flight(0, 41, done=False), flight(1, 40, done=True)])
    assert said[0].startswith("no progress for 12 s: rank 1 is computing but does not finish a step; rank")
    assert "flight recorder, group 0 default_pg: rank 0 collective 41, all_reduce of [20], not done" in said[0]
    asked = [what for what, ranks in orders if ranks == [0, 1]]
    assert asked.index("write_stacks") < asked.index("dump_stacks") < asked.index("position")


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("flights", [[], [flight(0, 41, done=True), flight(1, 41, done=True)]])
def test_long_steps_in_which_nobody_waits_are_no_hang_and_the_recorders_are_asked_seldom(
    flights: list[CollectiveRecord],
) -> None:
    said, orders = watched(flights)
    assert said == []
    assert orders == [("flight", [0, 1])]


@pytest.mark.usefixtures("at_once")
def test_a_hang_that_a_signal_interrupts_for_a_moment_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the ranks are asked for may wake one; for one look nothing seems to hang."""
    monkeypatch.setattr(watchdog, "SETTLED_S", 0.1)
    loop, said = Loop(), []
    watch = Watchdog(loop, lambda: [0, 1], lambda *_: None, said.append, lambda _: None, {})
    asleep = replace(computing(1), state="S", since_activity=12.0)
    waits = replace(computing(0), operation="all_reduce", site="train.py:20", since_activity=12.0)
    for pulse in (waits, asleep):
        watch.on_message("node1", "heartbeat", asdict(pulse))
    loop.at(0.05, lambda: watch.on_message("node1", "heartbeat", asdict(replace(asleep, since_progress=0.1))))
    loop.at(0.08, lambda: watch.on_message("node1", "heartbeat", asdict(asleep)))
    loop.at(0.6, loop.stop)
    loop.run()
    watch.close()
    assert [text.partition(":")[0] for text in said] == ["no progress for 12 s"]


@pytest.mark.parametrize(("machines", "said"), [(1, []), (2, ["slow for all"])])
def test_no_network_is_blamed_within_one_machine(machines: int, said: list[str], monkeypatch: Any) -> None:
    loop, heard = Loop(), []
    watch = Watchdog(loop, lambda: [0, 1], lambda *_: None, heard.append, lambda _: None, {}, machines=machines)
    for rank in (0, 1):
        watch.on_message("localhost", "heartbeat", asdict(computing(rank)))  # machines may have the same name
    monkeypatch.setattr(watch._stragglers, "found", lambda *_: [("network", [], "slow for all")])
    watch._compare()
    watch.close()
    assert heard == said
