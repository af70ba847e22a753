"""Whether all ranks save this step and leave: because somebody has asked, or because the job's time is nearly over.

Both are requests of one rank that travel with the report of the step which ends next
(:mod:`samestep.runtime.step_state`). So there must be somebody who reports steps, the data; or one rank alone, which
agrees with itself.
"""

from __future__ import annotations

import signal
import sys
import time

from samestep.errors import UsageError
from samestep.running.checkpoints.time_limit import parse_time_limit, slurms_time_limit
from samestep.running.preemption import Preemption
from samestep.runtime.world import World

__all__: list[str] = []


class Leaving:
    """The end of a run that is not finished.

    Args:
        world: its ranks. Its step state must listen before :meth:`watch` is called.
        reports: whether there are data, which report every step.
        saves: whether anything is saved; who does not save has no reason to leave.
        time_limit: of :func:`samestep.checkpoint`.

    Raises:
        UsageError: the time limit is no time, or the ranks have no means to agree on the step to save.
    """

    def __init__(self, world: World, *, reports: bool, saves: bool, time_limit: float | str | None) -> None:
        self.is_possible = saves and (reports or world.size == 1)
        self._world = world
        self._reports = reports
        self._limit = parse_time_limit(time_limit, time.monotonic())
        if time_limit is None and self.is_possible and world.is_first:
            self._limit = slurms_time_limit(time.monotonic())
        self._is_late = False
        self._preemption: Preemption | None = None
        if self._limit is not None and saves and not self.is_possible:
            raise UsageError(
                f"time_limit={time_limit!r}: {world.size} ranks agree on the step to save through the reports of their "
                "data, so name them, as in checkpoint(path, world, data=batches)"
            )

    def watch(self) -> None:
        """Takes the signals, where that is possible."""
        if self.is_possible:
            self._preemption = Preemption(self._world.step)

    def note_commit(self, slowest_save: float) -> None:
        """Requests a stop on rank 0 when the time is nearly over; called when a step ends, before it is reported."""
        if not self.is_possible or self._limit is None or not self._world.is_first:
            return
        now = time.monotonic()
        self._limit.note_commit(now)
        if not self._is_late and self._limit.is_near(now, slowest_save):
            self._is_late = True
            left, margin = max(0.0, self._limit.ends - now), self._limit.margin(slowest_save)
            sys.stderr.write(
                f"samestep: the time limit is {left:.0f} s away, a last step and save may take {margin:.0f} s: all "
                "ranks save and leave\n"
            )
            self._world.step.request("stop")

    @property
    def is_agreed(self) -> bool:
        """Whether all ranks leave behind the step that has just ended."""
        if not self._reports and self._world.size == 1 and (self._is_late or self.number is not None):
            return True
        return "stop" in self._world.step.agreed

    @property
    def number(self) -> int | None:
        """The signal that has asked; None where it was none of this rank's or of the launcher's."""
        return None if self._preemption is None else self._preemption.number

    @property
    def why(self) -> str:
        """What rank 0 says of it."""
        by = "" if self.number is None else f" by {signal.Signals(self.number).name}"
        return "out of time" if self._is_late and not by else f"preempted{by}"

    def close(self) -> None:
        """Gives the signals back."""
        if self._preemption is not None:
            self._preemption.close()
