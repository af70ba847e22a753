"""Graceful shutdown: all ranks save the same step and leave with exit code 75, when asked or when time is nearly over.

    SIGTERM or SIGUSR1, to any one rank      schedulers send them to some processes of a job, or to all
    the launcher's order, to every rank      over the control pipe (samestep.launch.rank.control)
    the deadline, on rank 0                  given by the script, or by Slurm
                     |
                     v
    request "stop", with the report of the step that ends next  ->  agreed: all save after the step behind it, and leave

A handler that saved where the signal found it would save different steps on different ranks, or wait for a peer that
does not save. So there must be data, which report steps; or one rank alone, which agrees with itself.
"""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from types import FrameType

from samestep.checkpoints.interval import parse_duration
from samestep.errors import UsageError
from samestep.launch.rank import control
from samestep.rankenv import child_environment, variable
from samestep.runtime.step_state import StepState
from samestep.runtime.world import World

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_LEAST_MARGIN_S = 20.0
_SCONTROL_TIMEOUT_S = 10.0


class GracefulShutdown:
    """The end of a run that is not finished.

    The world's requests must be enabled before :meth:`install_handlers` is called. `reports` says that there are data,
    which report every step; `saves` whether anything is saved: who does not save has no reason to leave.
    """

    def __init__(self, world: World, *, reports: bool, saves: bool, time_limit: float | str | None) -> None:
        self.is_possible = saves and (reports or world.size == 1)
        self._world = world
        self._reports = reports
        self._deadline = parse_time_limit(time_limit, time.monotonic())
        if time_limit is None and self.is_possible and world.is_first:
            self._deadline = slurm_deadline(time.monotonic())
        self._is_late = False
        self._signals: StopSignals | None = None
        if self._deadline is not None and saves and not self.is_possible:
            raise UsageError(
                f"time_limit={time_limit!r}: {world.size} ranks agree on the step to save through the reports of their "
                "data, so name them, as in checkpoint(path, world, data=batches)"
            )

    def install_handlers(self) -> None:
        if self.is_possible:
            self._signals = StopSignals(self._world.step)

    def on_commit(self, slowest_save: float) -> None:
        """Requests a stop on rank 0 when the time is nearly over; called when a step ends, before it is reported."""
        if not self.is_possible or self._deadline is None or not self._world.is_first:
            return
        now = time.monotonic()
        self._deadline.note_step(now)
        if not self._is_late and self._deadline.is_near(now, slowest_save):
            self._is_late = True
            left, margin = max(0.0, self._deadline.at - now), self._deadline.margin(slowest_save)
            sys.stderr.write(
                f"samestep: the time limit is {left:.0f} s away, a last step and save may take {margin:.0f} s: all "
                "ranks save and leave\n"
            )
            self._world.step.request("stop")

    @property
    def should_stop(self) -> bool:
        if not self._reports and self._world.size == 1 and (self._is_late or self.signal is not None):
            return True
        return "stop" in self._world.step.agreed

    @property
    def signal(self) -> int | None:
        """The signal that has asked; None where it was none of this rank's or of the launcher's."""
        return None if self._signals is None else self._signals.number

    @property
    def reason(self) -> str:
        by = "" if self.signal is None else f" by {signal.Signals(self.signal).name}"
        return "out of time" if self._is_late and not by else f"preempted{by}"

    def close(self) -> None:
        if self._signals is not None:
            self._signals.close()


# --- signals and the launcher's order -----------------------------------------------------------------------


class StopSignals:
    """Passes signals on to all ranks as requests to stop.

    There may be several, one of each checkpoint: all of them are asked, and the last to close restores the handlers.
    A second signal changes nothing: Slurm sends SIGTERM twice before SIGKILL.
    """

    def __init__(self, step: StepState) -> None:
        self._step = step
        self._process = os.getpid()
        self.number: int | None = None  # the signal that asked, here or at the launcher
        _live.append(self)
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) == signal.SIG_DFL:  # the script's own handler knows better
                    signal.signal(number, _handle)
        control.when_preempted(_request_all)

    def request_stop(self, number: int) -> None:
        """Requests that all ranks leave, if nobody has asked before."""
        if self.is_of_this_process and self.number is None:
            self.number = number
            self._step.request("stop")

    def close(self) -> None:
        """Requests no more; more than once does no harm."""
        if self not in _live:
            return
        _live.remove(self)
        if not any(other.is_of_this_process for other in _live):
            _restore_handlers()

    @property
    def is_of_this_process(self) -> bool:
        """Whether it is no copy that a fork has made.

        Workers of a DataLoader inherit the handler by fork; there it does nothing, so that a signal to the whole group
        does not end them before the last save.
        """
        return self._process == os.getpid()


_live: list[StopSignals] = []


def _request_all(number: int) -> None:
    for one in tuple(_live):
        one.request_stop(number)


def _handle(number: int, frame: FrameType | None) -> None:  # noqa: ARG001  (the signature of handlers)
    if _live:
        _request_all(number)
        return
    signal.signal(number, signal.SIG_DFL)  # the last was closed on another thread, which may not restore handlers
    signal.raise_signal(number)


def _restore_handlers() -> None:
    control.when_preempted(None)
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            if signal.getsignal(number) is _handle:
                signal.signal(number, signal.SIG_DFL)


# --- the deadline -------------------------------------------------------------------------------------------


@dataclass
class Deadline:
    """The end of a job, and what is known of how long steps take. All times in seconds of the monotonic clock.

    A clock that is set meanwhile would move the end, or make a step of hours of one.
    """

    at: float  # when the job is ended
    started: float  # when that was found out
    _steps: deque[float] = field(default_factory=lambda: deque(maxlen=200))
    _ended: float | None = None

    def note_step(self, now: float) -> None:
        """Notes that a step has ended; the time before the first of them is no step's."""
        if self._ended is not None:
            self._steps.append(now - self._ended)
        self._ended = now

    def margin(self, slowest_save: float) -> float:
        """Returns how long before the end all ranks must be told: two saves, since one may be under way."""
        least = min(_LEAST_MARGIN_S, (self.at - self.started) / 10)
        return max(least, 2 * (max(self._steps, default=0.0) + slowest_save))

    def is_near(self, now: float, slowest_save: float) -> bool:
        """Whether the step that ends next but one, and a save behind it, may be the last that fit in."""
        return now >= self.at - self.margin(slowest_save)


def parse_time_limit(given: float | str | None, now: float) -> Deadline | None:
    """Reads ``time_limit`` of :func:`samestep.checkpoint`, which counts from now on; None where there is none.

    >>> parse_time_limit("2 h", now=1000.0).at
    8200.0
    """
    if given is None:
        return None
    seconds = parse_duration(given) if isinstance(given, str) else given
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        raise UsageError(
            f"time_limit={given!r} is no time; give seconds (7200), a text ('2 h', '90 min'), or None: what Slurm says"
        )
    return Deadline(now + seconds, now) if math.isfinite(seconds) else None


def slurm_deadline(now: float) -> Deadline | None:
    """Returns when Slurm ends the job that this process belongs to; None where there is none, or nobody knows.

    Slurm says it in seconds since 1970, in SLURM_JOB_END_TIME, or where it does not set that (22.05 does not), when it
    is asked once. `now` is on the monotonic clock.
    """
    shift = now - time.time()  # from seconds since 1970
    end = variable("SLURM_JOB_END_TIME", "") or ""
    if re.fullmatch(r"[1-9]\d{0,11}", end, re.ASCII):
        return Deadline(float(end) + shift, now)
    job = variable("SLURM_JOB_ID", "") or ""
    if not re.fullmatch(r"\d+", job, re.ASCII):
        return None
    at = _ask_scontrol(["scontrol", "--oneliner", "show", "job", job])
    return None if at is None else Deadline(at + shift, now)


def _ask_scontrol(command: list[str]) -> float | None:
    """The EndTime in what Slurm answers, in this host's own time, as seconds since 1970; None where there is none."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=_SCONTROL_TIMEOUT_S,
            env=child_environment({"SLURM_TIME_FORMAT": "standard"}),
            errors="replace",
        )
        found = re.search(r"\bEndTime=(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)\b", done.stdout, re.ASCII)
        return None if found is None else time.mktime(time.strptime(found[1], "%Y-%m-%dT%H:%M:%S"))
    except (OSError, subprocess.SubprocessError, ValueError, OverflowError):  # then its signal has to do
        return None
