"""Decides what happens to a run: whom to wait for, when to stop the rest, what to make of a signal.

    running --a rank fails--> settling --all ended, or 0.5 s--> stopping ----> asking ----> terminating ----> killing
       |                      others may explain better,        order over     stacks of    SIGTERM, to       SIGKILL
       |                      or end by themselves              the pipe       the silent   groups
       |
       +--SIGTERM, SIGUSR1--> preempting: order over the pipe; the ranks save, and leave with 75
       |                        +--a rank cannot--> the signal itself, to the ranks alone: SIGTERM ends them in their
       |                                            own way; SIGUSR1 goes to those that handle it, and the run goes on
       +--SIGINT, SIGHUP----> interrupted: the signal itself; 5 s later killing
       +--a second signal---> killing; but a scheduler repeats its own, and is patient until the grace is over

A rank that fails by itself is not hurried: as under python, its threads and its atexit handlers run to their end.

It sees messages of teams (samestep.launch.team), on this host or others, and gives them orders. torchrun looks at its
workers every 0.1 s, waits 30 s for them to end, and forwards signals to all processes of their groups, so that the
workers of a DataLoader die before the rank can save.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, Protocol

from samestep.launch.failure import FailureRecord, lost_host
from samestep.launch.loop import Alarm, Loop
from samestep.launch.verdict import PREEMPTED, RunResult, judge
from samestep.progress import Progress

__all__: list[str] = []

SETTLE = 0.5  # seconds for the others to end by themselves after a rank's own failure
PATIENCE = 2.0  # seconds to wait for a better reason than "my peer is gone"
OBEY = 0.3  # seconds to leave when told over the pipe
ANSWER = 0.1  # seconds for faulthandler to write the stacks of a rank that does not
GRACE = 5.0  # seconds between SIGTERM and SIGKILL
DEFAULT_GRACE_S = 30.0  # seconds to save in after SIGTERM; what Slurm and Kubernetes give by default
GENTLE = (signal.SIGTERM, signal.SIGUSR1)  # a scheduler's: save first


def ended(rank: int, pid: int, code: int, death: dict[str, Any], record: Progress) -> dict[str, Any]:
    """Returns what is told of a rank that has ended, by whoever looks after it, a team or a watcher.

    Args:
        rank: which.
        pid: its process.
        code: its exit code; of a signal, the negative number.
        death: a Failure as a dict: what is known from outside.
        record: its progress record.
    """
    told = {"rank": rank, "pid": pid, "code": code, "death": death}
    return {**told, "step": record.step, "calls": record.entered}


class Crew(Protocol):
    """The ranks of one host, as the supervisor sees them."""

    host: str
    ranks: tuple[int, ...]

    def order(self, what: str, ranks: Sequence[int], number: int = 0) -> None:
        """Passes an order on; see :meth:`samestep.launch.team.LocalRanks.order`."""


class Supervisor:
    """Watches one attempt of a run until all its ranks have ended.

    Args:
        loop: what waits.
        crews: who holds the ranks.
        done: called once, when no rank is left.
        grace: seconds that ranks may take to save after a preemption by SIGTERM.
    """

    def __init__(
        self, loop: Loop, crews: Sequence[Crew], done: Callable[[], None], *, grace: float = DEFAULT_GRACE_S
    ) -> None:
        self._loop = loop
        self._crews = list(crews)
        self._done = done
        self._grace = grace
        self._size = sum(len(crew.ranks) for crew in crews)
        self._codes: dict[int, int] = {}
        self._failures: dict[int, FailureRecord] = {}
        self._finished: dict[int, int] = {}  # rank and process that exited with code 0 before anybody failed by itself
        self._standing: dict[int, str] = {}  # where a rank stood when it was told to leave
        self._steps: dict[int, int] = {}
        self._calls: dict[int, int] = {}  # collectives that a rank has entered, the making of its group among them
        self._saved: tuple[int, str] | None = None  # step and path, when preempted
        self._signals: dict[str, int] = {}  # who passed on which signal
        self._saving = False  # ranks were asked to save, and none has said that it cannot
        self._overdue = False  # they were still at it when the time was up
        self._stopping = False  # the launcher itself has begun to end ranks
        self._lost: list[str] = []
        self._hung: int | None = None  # the rank that holds up a run which is stopped for it
        self._alarm: Alarm | None = None

    def hear(self, crew: Crew, kind: str, body: dict[str, Any]) -> None:
        """Takes note of a message from a team."""
        rank = body["rank"]
        if kind == "failed":
            self._failed(replace(FailureRecord(**body["failure"]), host=crew.host))
        elif kind == "ended":
            self._ended(crew, body)
        elif kind == "waiting" and body["where"] is not None:
            self._standing[rank] = _line(body["where"], body["source"])
        elif kind == "preempted":
            self._saved = (body["step"], body["path"])
        elif kind == "cannot":
            self._cannot_save(crew, body)

    def _cannot_save(self, crew: Crew, body: dict[str, Any]) -> None:
        """Passes the signal itself on. SIGUSR1 only asks: unhandled it would end a script that has asked for none."""
        self._saving = False
        number = body.get("number", signal.SIGTERM)
        if number == signal.SIGUSR1:
            self._signals.clear()
        if number != signal.SIGUSR1 or body.get("handles", True):
            crew.order("signal", [body["rank"]], number)

    def lost(self, crew: Crew, reason: str) -> None:
        """A host is gone, and its ranks with it."""
        self._lost.append(crew.host)
        gone = [rank for rank in crew.ranks if rank not in self._codes]
        for rank in gone:
            self._codes[rank] = -signal.SIGKILL
        if gone and not self._stopping:
            self._failed(lost_host(gone[0], crew.host, reason))
        self._finish_if_over()

    def running(self) -> list[int]:
        """Returns the ranks that have not ended; none while they are told to end."""
        held = [rank for crew in self._crews for rank in crew.ranks if rank not in self._codes]
        return [] if self.ending or self._failures else held

    def order(self, what: str, ranks: Collection[int]) -> None:
        """Gives an order to some ranks that have not ended."""
        self._order(what, spare={rank for crew in self._crews for rank in crew.ranks} - set(ranks))

    def hung(self, failure: FailureRecord) -> None:
        """Ends a run that hangs, for this reason."""
        if not self.ending:
            self._failures[failure.rank] = failure
            self._hung = failure.rank
            self._stop()

    @property
    def ending(self) -> bool:
        """Whether ranks are told to end, by us or by a signal."""
        return self._stopping or bool(self._signals)

    def verdict(self) -> RunResult:
        """Returns what became of it."""
        found = judge(self._codes, list(self._failures.values()), self._finished, self._interrupted())
        lost = [failure for failure in self._failures.values() if failure.lost_peer and failure.where is not None]
        standing = self._standing | {
            failure.rank: _place(failure) for failure in lost
        }  # not where it stood at its exit
        return replace(
            found,
            standing={rank: standing[rank] for rank in found.waiting if rank in standing},
            saved=self._saved,
            overdue=self._grace if self._overdue else None,
            step=max(self._steps.values(), default=0),
            after=0 if found.blamed is None else self._steps.get(found.blamed.rank, 0),
            apart=self._trained_apart(),
            lost=tuple(self._lost),
            failures=tuple(self._failures.values()),
        )

    def _trained_apart(self) -> bool:
        """Whether several ranks have all trained, and none has ever met another."""
        everybody = len(self._steps) == self._size > 1
        return everybody and all(self._steps.values()) and not any(self._calls.values())

    def _interrupted(self) -> int | None:
        return next(iter(self._signals.values()), None)

    def _ended(self, crew: Crew, body: dict[str, Any]) -> None:
        rank, code = body["rank"], body["code"]
        self._codes[rank] = code
        self._steps[rank] = body["step"]
        self._calls[rank] = body["calls"]
        if code == 0 and not self._stopping and all(failure.lost_peer for failure in self._failures.values()):
            self._finished[rank] = body["pid"]  # a victim may be heard before its culprit has quite gone
        elif code not in {0, PREEMPTED} and rank not in self._failures and not self._stopping and not self._signals:
            self._failed(replace(FailureRecord(**body["death"]), host=crew.host))
        self._finish_if_over()

    def _finish_if_over(self) -> None:
        if len(self._codes) == self._size:
            self._set(None)
            self._done()

    def _failed(self, failure: FailureRecord) -> None:
        if self._stopping:
            return
        first = not self._failures
        self._failures[failure.rank] = failure
        if self._signals and not self._saving:
            return  # it is ending already, in the time that the signal gave
        shared = failure.lost_peer or failure.usage  # others may say more, or the same
        if first or not failure.lost_peer:
            self._set(PATIENCE if shared else SETTLE, self._stop, unless_sooner=not first)

    def _set(
        self, seconds: float | None, step: Callable[[], None] | None = None, *, unless_sooner: bool = False
    ) -> None:
        """Makes `step` the next thing to happen by itself; None: nothing."""
        if self._alarm is not None:
            if unless_sooner and seconds is not None and self._alarm.due <= time.monotonic() + seconds:
                return
            self._alarm.cancel()
        self._alarm = None if seconds is None or step is None else self._loop.at(seconds, step)

    def _order(self, what: str, number: int = 0, *, spare: Collection[int] = ()) -> None:
        for crew in self._crews:
            ranks = [rank for rank in crew.ranks if rank not in self._codes and rank not in spare]
            crew.order(what, ranks, number)

    def _leaving(self) -> list[int]:
        """Ranks that end by themselves, after their own exception."""
        return [rank for rank, failure in self._failures.items() if not failure.lost_peer and rank != self._hung]

    def _stop(self) -> None:
        self._stopping = True
        self._order("stop", spare=self._leaving())
        self._set(OBEY, self._ask)

    def _ask(self) -> None:
        self._order("ask", spare=self._leaving())
        self._set(ANSWER, self._terminate)

    def _terminate(self) -> None:
        self._order("waiting", spare=self._leaving())
        self._order("terminate", spare=self._leaving())
        self._set(GRACE, self._kill)

    def _save_timed_out(self) -> None:
        self._overdue = self._saving
        self._kill()

    def _kill(self) -> None:
        self._stopping = True
        self._order("kill")
        self._set(None)

    def signalled(self, number: int, source: str = "") -> None:
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
            self._order("preempt", number)
            if number == signal.SIGTERM:
                self._set(self._grace, self._save_timed_out)
        else:
            self._order("signal", number)
            self._set(GRACE, self._kill)


def _place(failure: FailureRecord) -> str:
    return _line(str(failure.where), failure.source)


def _line(where: str, source: str | None) -> str:
    return f"{where}  {source or ''}".rstrip()
