"""What the supervisor decides, told of ranks that are made up; the time is made up, too."""

from __future__ import annotations

import signal
from dataclasses import asdict
from types import SimpleNamespace

import pytest

from samestep.launch import event_loop, supervisor
from samestep.launch.rank.failure import FailureRecord, death
from samestep.launch.supervisor import CAUSE_S, KILL_AFTER_S, OTHER_FAILURES_S, STACKS_S, STOP_S, Supervisor


class Host:
    """Keeps the orders that its ranks get."""

    def __init__(self, host, ranks):
        self.host = host
        self.ranks = tuple(ranks)
        self.orders = []

    def command(self, what, ranks, number=0):
        if ranks:
            self.orders.append((what, list(ranks), number))


class Run:
    """Some ranks of one host or several, and their supervisor."""

    def __init__(self, monkeypatch, *ranks, grace=30.0):
        self.now = 100.0
        for module in (event_loop, supervisor):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.loop = event_loop.Loop()
        self.hosts = [Host(f"node{number}", each) for number, each in enumerate(ranks, 1)]
        self.over = 0
        self.supervisor = Supervisor(self.loop, self.hosts, self.end, grace=grace)

    def end(self):
        self.over += 1

    def hear(self, kind, rank, **body):
        host = next(host for host in self.hosts if rank in host.ranks)
        self.supervisor.on_message(host, kind, {"rank": rank, **body})

    def fails(self, rank, exception="ValueError", **more):
        failure = FailureRecord(
            rank=rank, pid=rank, exception=exception, message="no", exit_code=1, time=self.now, **more
        )
        self.hear("failed", rank, failure=asdict(failure))

    def ends(self, rank, code=0, step=0, collectives=1):
        body = {"pid": 70 + rank, "code": code, "death": asdict(death(rank, 70 + rank, code))}
        self.hear("ended", rank, **body, step=step, collectives=collectives)

    def passes(self, seconds):
        """Returns the orders, of all hosts, that are given within so many seconds."""
        self.now += seconds
        self.loop.turn(0.0)
        return self.orders()

    def orders(self):
        given = [order for host in self.hosts for order in host.orders]
        for host in self.hosts:
            host.orders.clear()
        return given


@pytest.fixture
def start(monkeypatch):
    return lambda *ranks, **options: Run(monkeypatch, *ranks, **options)


MOMENT = 0.01


def test_the_others_are_stopped_step_by_step_and_the_rank_that_failed_ends_by_itself(start):
    run = start([0, 1, 2])
    run.fails(1)
    assert run.passes(OTHER_FAILURES_S - MOMENT) == []
    assert run.supervisor.running() == []
    assert not run.supervisor.ending
    assert run.passes(MOMENT) == [("stop", [0, 2], 0)]
    assert run.supervisor.ending
    assert run.passes(STOP_S - MOMENT) == []
    assert run.passes(MOMENT) == [("dump_stacks", [0, 2], 0)]
    assert run.passes(STACKS_S - MOMENT) == []
    assert run.passes(MOMENT) == [("position", [0, 2], 0), ("terminate", [0, 2], 0)]
    run.ends(0, -15)
    assert run.passes(KILL_AFTER_S - MOMENT) == []
    assert run.passes(MOMENT) == [("kill", [1, 2], 0)]
    run.ends(2, -9)
    assert run.over == 0
    run.ends(1, 1)
    assert run.over == 1
    assert run.passes(100) == []
    verdict = run.supervisor.result()
    assert (verdict.root_cause.rank, verdict.root_cause.host, verdict.lost_peer_ranks, verdict.exit_code) == (
        1,
        "node1",
        (0, 2),
        1,
    )


def test_a_lost_peer_is_waited_for_longer_and_its_reason_counts_from_when_it_is_heard(start):
    run = start([0, 1, 2])
    run.fails(0, lost_peer=True, where="train.py:3")
    assert run.passes(1.0) == []
    run.fails(1)
    assert run.passes(OTHER_FAILURES_S - MOMENT) == []
    assert run.passes(MOMENT) == [("stop", [0, 2], 0)]
    assert run.supervisor.result().root_cause.rank == 1


def test_ranks_that_only_lost_a_peer_are_stopped_after_a_while(start):
    run = start([0, 1, 2])
    run.fails(0, lost_peer=True)
    assert run.passes(1.0) == []
    run.fails(2, lost_peer=True)  # no reason to wait longer
    assert run.passes(CAUSE_S - 1.0 - MOMENT) == []
    assert run.passes(MOMENT) == [("stop", [0, 1, 2], 0)]


def test_a_second_failure_does_not_give_the_others_more_time(start):
    run = start([0, 1, 2])
    run.fails(1)
    assert run.passes(OTHER_FAILURES_S / 2) == []
    run.fails(2)
    assert run.passes(OTHER_FAILURES_S / 2) == [("stop", [0], 0)]
    run.fails(0)  # too late to be a reason
    assert sorted(failure.rank for failure in run.supervisor.result().failures) == [1, 2]


def test_a_usage_error_waits_for_the_others_to_say_the_same(start):
    run = start([0, 1])
    run.fails(0, usage=True)
    assert run.passes(CAUSE_S - MOMENT) == []
    assert run.passes(MOMENT) == [("stop", [1], 0)]


def test_a_rank_that_ended_well_before_the_others_lost_it_is_blamed(start):
    run = start([0, 1])
    run.fails(0, lost_peer=True)
    run.ends(1, 0)
    run.ends(0, 1)
    blamed = run.supervisor.result().root_cause
    assert (blamed.rank, blamed.pid, blamed.exception) == (1, 71, "EarlyExit")


def test_a_rank_that_ends_well_after_anothers_own_failure_is_not_blamed(start):
    run = start([0, 1])
    run.fails(0)
    run.ends(1, 0)
    assert (run.supervisor.result().root_cause.rank, run.supervisor.result().lost_peer_ranks) == (0, (1,))


@pytest.mark.parametrize(("code", "exception", "exit_code"), [(-9, "Signal", 137), (7, "Exit", 7)])
def test_a_rank_that_ends_without_a_word_has_failed(start, code, exception, exit_code):
    run = start([0], [1])
    run.ends(1, code)
    assert run.passes(OTHER_FAILURES_S) == [("stop", [0], 0)]
    run.ends(0, -15)  # ended by us
    (failure,) = run.supervisor.result().failures
    assert (failure.rank, failure.host, failure.exception, failure.exit_code) == (1, "node2", exception, exit_code)


def test_a_rank_that_has_said_why_it_fails_keeps_its_reason_when_it_ends(start):
    run = start([0])
    run.fails(0)
    run.ends(0, 1)
    assert run.supervisor.result().root_cause.exception == "ValueError"


def test_ranks_that_have_saved_and_left_have_not_failed(start):
    run = start([0, 1])
    run.supervisor.on_signal(signal.SIGTERM)
    run.hear("preempted", 0, step=7, path="kept/7")
    run.ends(0, 75)
    run.ends(1, 75)
    verdict = run.supervisor.result()
    assert (verdict.exit_code, verdict.saved, verdict.failures, verdict.save_timed_out) == (75, (7, "kept/7"), (), None)


def test_after_sigterm_ranks_have_the_grace_to_save_in(start):
    run = start([0, 1], grace=8.0)
    run.supervisor.on_signal(signal.SIGTERM, "node1")
    assert run.orders() == [("preempt", [0, 1], signal.SIGTERM)]
    assert run.supervisor.running() == []
    run.supervisor.on_signal(signal.SIGTERM, "node1")  # Slurm repeats itself
    run.supervisor.on_signal(signal.SIGUSR1)
    run.fails(0, lost_peer=True)
    assert run.passes(CAUSE_S) == [("stop", [0, 1], 0)]  # while they save, a failure is one


@pytest.mark.parametrize("numbers", [(signal.SIGTERM,), (signal.SIGTERM, signal.SIGTERM)])
def test_what_is_not_saved_when_the_grace_is_over_is_killed_and_told_of(start, numbers):
    run = start([0, 1], grace=8.0)
    for number in numbers:
        run.supervisor.on_signal(number)
    run.orders()
    assert run.passes(8.0 - MOMENT) == []
    assert run.passes(MOMENT) == [("kill", [0, 1], 0)]
    run.ends(0, -9)
    run.ends(1, -9)
    verdict = run.supervisor.result()
    assert (verdict.save_timed_out, verdict.exit_code, verdict.failures) == (8.0, 143, ())


def test_ctrl_c_soon_after_sigterm_does_not_say_that_the_time_to_save_was_up(start):
    run = start([0, 1], grace=30.0)
    run.supervisor.on_signal(signal.SIGTERM)
    run.passes(2.0)
    run.supervisor.on_signal(signal.SIGINT)
    assert run.orders() == [("kill", [0, 1], 0)]
    run.ends(0, -9)
    run.ends(1, -9)
    verdict = run.supervisor.result()
    assert (verdict.save_timed_out, verdict.exit_code) == (None, 143)


def test_a_rank_that_cannot_save_gets_the_signal_itself(start):
    run = start([0, 1], grace=8.0)
    run.supervisor.on_signal(signal.SIGTERM)
    run.orders()
    run.hear("preempt_unsupported", 1, number=signal.SIGTERM)
    assert run.orders() == [("signal", [1], signal.SIGTERM)]
    run.ends(1, -15)
    assert run.passes(CAUSE_S) == []  # the time that the signal gave
    run.fails(0)
    assert run.passes(OTHER_FAILURES_S) == []
    assert run.passes(8.0 - CAUSE_S - OTHER_FAILURES_S) == [("kill", [0], 0)]
    assert run.supervisor.result().save_timed_out is None


@pytest.mark.parametrize("handles", [True, False])
def test_sigusr1_only_asks_and_the_run_goes_on_where_it_cannot_be_obeyed(start, handles):
    run = start([0, 1])
    run.supervisor.on_signal(signal.SIGUSR1)
    assert run.orders() == [("preempt", [0, 1], signal.SIGUSR1)]
    assert run.passes(1000.0) == []
    run.hear("preempt_unsupported", 0, number=signal.SIGUSR1, handles=handles)
    assert run.orders() == ([("signal", [0], signal.SIGUSR1)] if handles else [])
    assert run.supervisor.running() == [0, 1]
    assert not run.supervisor.ending
    run.supervisor.on_signal(signal.SIGUSR1)  # again: it is not the second of one ending
    assert run.orders() == [("preempt", [0, 1], signal.SIGUSR1)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_ctrl_c_reaches_all_ranks_and_who_does_not_end_is_killed(start, number):
    run = start([0], [1])
    run.supervisor.on_signal(number)
    assert run.orders() == [("signal", [0], number), ("signal", [1], number)]
    run.ends(0, -number)
    run.fails(1)  # of the signal
    assert run.passes(KILL_AFTER_S - MOMENT) == []
    assert run.passes(MOMENT) == [("kill", [1], 0)]
    run.ends(1, -9)
    verdict = run.supervisor.result()
    assert (verdict.exit_code, verdict.interrupted, verdict.save_timed_out) == (128 + number, number, None)


def test_a_second_ctrl_c_does_not_wait(start):
    run = start([0])
    run.supervisor.on_signal(signal.SIGINT)
    run.orders()
    run.supervisor.on_signal(signal.SIGINT)
    assert run.orders() == [("kill", [0], 0)]


def test_a_signal_that_reaches_every_host_is_one(start):
    run = start([0], [1])
    run.supervisor.on_signal(signal.SIGINT, "node1")
    run.orders()
    run.supervisor.on_signal(signal.SIGINT, "node2")
    assert run.orders() == []
    run.supervisor.on_signal(signal.SIGINT, "node2")
    assert run.orders() == [("kill", [0], 0), ("kill", [1], 0)]


def test_a_signal_while_ranks_are_stopped_does_not_wait(start):
    run = start([0, 1])
    run.fails(0)
    assert run.passes(OTHER_FAILURES_S) == [("stop", [1], 0)]
    run.supervisor.on_signal(signal.SIGINT)
    assert run.orders() == [("kill", [0, 1], 0)]


def test_a_host_that_is_lost_takes_its_ranks_along(start):
    run = start([0, 1], [2, 3])
    run.ends(2, 0)
    run.supervisor.on_lost_host(run.hosts[1], "no heartbeat")
    assert run.passes(CAUSE_S) == [("stop", [0, 1], 0)]
    run.ends(0, -15)
    assert run.over == 0
    run.ends(1, -15)
    assert run.over == 1
    verdict = run.supervisor.result()
    assert (verdict.root_cause.host, verdict.root_cause.rank, verdict.root_cause.exception) == ("node2", 3, "HostLost")


def test_a_host_that_is_lost_while_ranks_are_stopped_is_no_reason(start):
    run = start([0], [1])
    run.fails(0)
    run.passes(OTHER_FAILURES_S)
    run.supervisor.on_lost_host(run.hosts[1], "no heartbeat")
    assert [failure.rank for failure in run.supervisor.result().failures] == [0]


def test_a_run_that_hangs_is_stopped_with_the_rank_that_holds_it_up(start):
    run = start([0, 1])
    run.supervisor.on_hang(FailureRecord(rank=1, pid=1, exception="Hang", message="no", exit_code=124))
    assert run.orders() == [("stop", [0, 1], 0)]
    run.supervisor.on_hang(FailureRecord(rank=0, pid=1, exception="Hang", message="no", exit_code=124))
    assert [failure.rank for failure in run.supervisor.result().failures] == [1]


def test_orders_of_others_reach_the_ranks_that_are_left(start):
    run = start([0, 1], [2])
    run.ends(1, 0)
    run.supervisor.command("dump_stacks", [1, 2])
    assert run.orders() == [("dump_stacks", [2], 0)]
    assert run.supervisor.running() == [0, 2]


def test_a_rank_that_lost_a_peer_stood_where_it_noticed_and_another_where_it_was_stopped(start):
    run = start([0, 1, 2, 3])
    run.fails(0, lost_peer=True, where="train.py:3", source="meet()")
    run.fails(1)
    for rank in (0, 2):
        run.hear("position", rank, where="train.py:9", source="sleep()")
    run.hear("position", 3, where=None, source=None)
    for rank, code in enumerate((1, 1, -15, -15)):
        run.ends(rank, code, step=rank)
    verdict = run.supervisor.result()
    assert verdict.positions == {0: "train.py:3  meet()", 2: "train.py:9  sleep()"}
    assert (verdict.step, verdict.steps_of_cause) == (3, 1)


@pytest.mark.parametrize(
    ("steps", "calls", "apart"),
    [
        ((3, 3), (0, 0), True),
        ((3, 3), (1, 1), False),
        ((3, 3), (0, 1), False),
        ((3,), (0,), False),
        ((3, 0), (0, 0), False),
    ],
    ids=["each by itself", "together", "one joined", "alone", "not all train"],
)
def test_ranks_that_train_and_never_meet_are_noticed(start, steps, calls, apart):
    run = start(range(len(steps)))
    for rank, (step, call) in enumerate(zip(steps, calls, strict=True)):
        run.ends(rank, 0, step=step, collectives=call)
    assert run.supervisor.result().never_communicated == apart
