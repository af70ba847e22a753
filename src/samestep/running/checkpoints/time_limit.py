"""When a job's time is nearly over: early enough that one more save fits, as long as the last ones took.

A scheduler ends a job that has used up its time, seconds after a signal that may come too late for a large save. Slurm
says when: in SLURM_JOB_END_TIME, or where it does not set that (22.05 does not), when it is asked once. Elsewhere the
script says it. Rank 0's clock decides, the monotonic one: a clock that is set meanwhile would move the end, or make a
step of hours of one.

    ── commit k ─────────── k + 1 ────┬── save ──┬─── margin left ───┤ end
         request "stop"          agreed, all ranks save and leave

    margin   2 x (slowest of the last steps + slowest of the last saves: one may be under way), at least 20 s or a tenth
"""

from __future__ import annotations

import math
import re
import subprocess
import time
from collections import deque
from dataclasses import dataclass, field

from samestep.errors import UsageError
from samestep.rankenv import child_environment, variable
from samestep.running.checkpoints.every import parse_seconds

__all__: list[str] = []

LEAST_S = 20.0
_ANSWER_S = 10.0  # seconds that Slurm may take to answer
_LATEST_STEPS = 200


@dataclass
class TimeLimit:
    """The end of a job, and what is known of how long steps take. All times in seconds of the monotonic clock.

    Attributes:
        ends: when the job is ended.
        begins: when that was found out.
    """

    ends: float
    begins: float
    _gaps: deque[float] = field(default_factory=lambda: deque(maxlen=_LATEST_STEPS))
    _committed: float | None = None

    def note_commit(self, now: float) -> None:
        """Notes that a step was committed; the time before the first of them is no step's."""
        if self._committed is not None:
            self._gaps.append(now - self._committed)
        self._committed = now

    def margin(self, slowest_save: float) -> float:
        """Returns how long before the end all ranks must be told."""
        least = min(LEAST_S, (self.ends - self.begins) / 10)
        return max(least, 2 * (max(self._gaps, default=0.0) + slowest_save))

    def is_near(self, now: float, slowest_save: float) -> bool:
        """Whether the step that ends next but one, and a save behind it, may be the last that fit in."""
        return now >= self.ends - self.margin(slowest_save)


def parse_time_limit(given: float | str | None, now: float) -> TimeLimit | None:
    """Reads ``time_limit`` of :func:`samestep.checkpoint`, which counts from now on; None where there is none.

    Raises:
        UsageError: it is no time.

    Example:
        >>> parse_time_limit("2 h", now=1000.0).ends
        8200.0
    """
    if given is None:
        return None
    seconds = parse_seconds(given) if isinstance(given, str) else given
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        raise UsageError(
            f"time_limit={given!r} is no time; give seconds (7200), a text ('2 h', '90 min'), or None: what Slurm says"
        )
    return TimeLimit(now + seconds, now) if math.isfinite(seconds) else None


def slurms_time_limit(now: float) -> TimeLimit | None:
    """Returns when Slurm ends the job that this process belongs to; None where there is none, or nobody knows.

    Args:
        now: on the monotonic clock. Slurm says it in seconds since 1970.
    """
    told = variable("SLURM_JOB_END_TIME", "") or ""
    shift = now - time.time()  # from seconds since 1970
    if re.fullmatch(r"[1-9]\d{0,11}", told, re.ASCII):
        return TimeLimit(float(told) + shift, now)
    job = variable("SLURM_JOB_ID", "") or ""
    if not re.fullmatch(r"\d+", job, re.ASCII):
        return None
    ends = _answered(["scontrol", "--oneliner", "show", "job", job])
    return None if ends is None else TimeLimit(ends + shift, now)


def _answered(command: list[str]) -> float | None:
    """The EndTime in what Slurm answers, in this host's own time, as seconds since 1970; None where there is none."""
    try:
        environment = child_environment({"SLURM_TIME_FORMAT": "standard"})
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_ANSWER_S, env=environment, errors="replace"
        )
        found = re.search(r"\bEndTime=(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)\b", done.stdout, re.ASCII)
        return None if found is None else time.mktime(time.strptime(found[1], "%Y-%m-%dT%H:%M:%S"))
    except (OSError, subprocess.SubprocessError, ValueError, OverflowError):  # then its signal has to do
        return None
