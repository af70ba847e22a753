"""Decides what happens to a run: how long to wait, when to stop the other ranks, what a signal means.

After a failure the others may explain it better, or end by themselves; then they are stopped over the pipe, asked
for stacks, terminated and killed. A rank that fails by itself is not hurried: its threads and atexit handlers run.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, Protocol

from samestep.launch.event_loop import Alarm, Loop
from samestep.launch.rank.failure import FailureRecord, code_line, lost_host
from samestep.launch.result import PREEMPTED, RunResult, decide

OTHER_FAILURES_S = 0.5  # for the others to end by themselves after a rank's own failure
CAUSE_S = 2.0  # to wait for a better reason than "my peer is gone"
STOP_S = 0.3  # to leave when told over the pipe
STACKS_S = 0.1  # for faulthandler to write the stacks of a rank that does not
KILL_AFTER_S = 5.0  # between SIGTERM and SIGKILL
DEFAULT_GRACE_S = 30.0  # to save in after SIGTERM; what Slurm and Kubernetes give by default
GENTLE = (signal.SIGTERM, signal.SIGUSR1)  # a scheduler's: save first


class HostHandle(Protocol):
    host: str
    ranks: tuple[int, ...]

    def command(self, what: str, ranks: Sequence[int], number: int = 0) -> None:
        """Passes a command on; see :meth:`samestep.launch.local_ranks.LocalRanks.command`."""


class Supervisor:
    """Watches one attempt of a run until all its ranks have ended; then calls `done`, once.

    Ranks may take `grace` seconds to save after a preemption by SIGTERM.
    """

    def __init__(
        self, loop: Loop, hosts: Sequence[HostHandle], done: Callable[[], None], *, grace: float = DEFAULT_GRACE_S
    ) -> None:
        self._loop = loop
        self._hosts = list(hosts)
        self._done = done
        self._grace = grace
        self._size = sum(len(host.ranks) for host in hosts)
        self._codes: dict[int, int] = {}
        self._failures: dict[int, FailureRecord] = {}
        self._finished: dict[int, int] = {}  # rank and process that exited with code 0 before any failed by itself
        self.positions: dict[int, str] = {}  # where a rank was when it was asked, or told to leave
        self._steps: dict[int, int] = {}
        self._collectives: dict[int, int] = {}  # that a rank has entered, the making of its group among them
        self._saved: tuple[int, str] | None = None  # step and path, when preempted
        self._signals: dict[str, int] = {}  # by the host whose agent passed it on, "" for the launcher
        self._saving = False  # ranks were asked to save, and none has said that it cannot
        self._save_timed_out = False  # they were still saving when the time was up
        self._stopping = False  # the launcher itself has begun to end ranks
        self._hung: int | None = None  # the rank that holds up a run which is stopped for it
        self._alarm: Alarm | None = None

    def on_message(self, host: HostHandle, kind: str, body: dict[str, Any]) -> None:
        rank = body["rank"]
        if kind == "failed":
            self._on_failure(replace(FailureRecord(**body["failure"]), host=host.host))
        elif kind == "ended":
            self._on_end(host, body)
        elif kind == "position" and body["where"] is not None:
            self.positions[rank] = code_line(body["where"], body["source"])
        elif kind == "preempted":
            self._saved = (body["step"], body["path"])
        elif kind == "preempt_unsupported":
            self._on_preempt_unsupported(host, body)

    def _on_preempt_unsupported(self, host: HostHandle, body: dict[str, Any]) -> None:
        """Passes the signal itself on. SIGUSR1 only asks: unhandled it would end a script that has asked for none."""
        self._saving = False
        number = body.get("number", signal.SIGTERM)
        if number == signal.SIGUSR1:
            self._signals.clear()
        if number != signal.SIGUSR1 or body.get("handles", True):
            host.command("signal", [body["rank"]], number)

    def on_lost_host(self, host: HostHandle, reason: str) -> None:
        gone = [rank for rank in host.ranks if rank not in self._codes]
        for rank in gone:
            self._codes[rank] = -signal.SIGKILL
        if gone and not self._stopping:
            self._on_failure(lost_host(gone[0], host.host, reason))
        self._finish_if_over()

    def on_hang(self, failure: FailureRecord) -> None:
        if not self.ending:
            self._failures[failure.rank] = failure
            self._hung = failure.rank
            self._stop()

    def running(self) -> list[int]:
        """Returns the ranks that have not ended; none while the run is ending."""
        held = [rank for host in self._hosts for rank in host.ranks if rank not in self._codes]
        return [] if self.ending or self._failures else held

    @property
    def ending(self) -> bool:
        """Whether ranks have been stopped, or sent a signal."""
        return self._stopping or bool(self._signals)

    def command(self, what: str, ranks: Collection[int]) -> None:
        self._command(what, spare={rank for host in self._hosts for rank in host.ranks} - set(ranks))

    def result(self) -> RunResult:
        interrupted = next(iter(self._signals.values()), None)
        found = decide(self._codes, list(self._failures.values()), self._finished, interrupted)
        lost = [failure for failure in self._failures.values() if failure.lost_peer and failure.where is not None]
        positions = self.positions | {failure.rank: failure.line for failure in lost}  # not where it was at its exit
        trained = len(self._steps) == self._size > 1 and all(self._steps.values())
        return replace(
            found,
            positions={
                rank: positions[rank] for rank in (*found.lost_peer_ranks, *found.no_error_ranks) if rank in positions
            },
            saved=self._saved,
            save_timed_out=self._grace if self._save_timed_out else None,
            step=max(self._steps.values(), default=0),
            steps_of_cause=0 if found.root_cause is None else self._steps.get(found.root_cause.rank, 0),
            never_communicated=trained and not any(self._collectives.values()),
            failures=tuple(self._failures.values()),
        )

    def _on_end(self, host: HostHandle, body: dict[str, Any]) -> None:
        rank, code = body["rank"], body["code"]
        self._codes[rank] = code
        self._steps[rank] = body["step"]
        self._collectives[rank] = body["collectives"]
        if code == 0 and not self._stopping and all(failure.lost_peer for failure in self._failures.values()):
            self._finished[rank] = body["pid"]  # a victim may be heard before its culprit has quite gone
        elif code not in {0, PREEMPTED} and rank not in self._failures and not self._stopping and not self._signals:
            self._on_failure(replace(FailureRecord(**body["death"]), host=host.host))
        self._finish_if_over()

    def _finish_if_over(self) -> None:
        if len(self._codes) == self._size:
            self._next(None)
            self._done()

    def _on_failure(self, failure: FailureRecord) -> None:
        if self._stopping:
            return
        first = not self._failures
        self._failures[failure.rank] = failure
        if self._signals and not self._saving:
            return  # it is ending already, in the time that the signal gave
        shared = failure.lost_peer or failure.usage  # others may say more, or the same
        if first or not failure.lost_peer:
            self._next(CAUSE_S if shared else OTHER_FAILURES_S, self._stop, unless_sooner=not first)

    def _next(
        self, seconds: float | None, step: Callable[[], None] | None = None, *, unless_sooner: bool = False
    ) -> None:
        if self._alarm is not None:
            if unless_sooner and seconds is not None and self._alarm.due <= time.monotonic() + seconds:
                return
            self._alarm.cancel()
        self._alarm = None if seconds is None or step is None else self._loop.at(seconds, step)

    def _command(self, what: str, number: int = 0, *, spare: Collection[int] = ()) -> None:
        for host in self._hosts:
            ranks = [rank for rank in host.ranks if rank not in self._codes and rank not in spare]
            host.command(what, ranks, number)

    def _exiting_ranks(self) -> list[int]:
        return [rank for rank, failure in self._failures.items() if not failure.lost_peer and rank != self._hung]

    def _stop(self) -> None:
        self._stopping = True
        self._command("stop", spare=self._exiting_ranks())
        self._next(STOP_S, self._dump_stacks)

    def _dump_stacks(self) -> None:
        self._command("dump_stacks", spare=self._exiting_ranks())
        self._next(STACKS_S, self._terminate)

    def _terminate(self) -> None:
        self._command("position", spare=self._exiting_ranks())
        self._command("terminate", spare=self._exiting_ranks())
        self._next(KILL_AFTER_S, self._kill)

    def _end_of_grace(self) -> None:
        self._save_timed_out = self._saving
        self._kill()

    def _kill(self) -> None:
        self._stopping = True
        self._command("kill")
        self._next(None)

    def on_signal(self, number: int, source: str = "") -> None:
        """A signal has reached the launcher, or the agent of the host called `source`."""
        if number in GENTLE and (self._saving or self._signals):  # Slurm repeats itself, to every host
            return
        if source in self._signals or (self._stopping and not self._signals):
            self._kill()
            return
        first = not self._signals
        self._signals[source] = number
        if not first:  # schedulers signal every host at once
            return
        if number in GENTLE:
            self._saving = True
            self._command("preempt", number)
            if number == signal.SIGTERM:
                self._next(self._grace, self._end_of_grace)
        else:
            self._command("signal", number)
            self._next(KILL_AFTER_S, self._kill)
