"""One attempt of a run, and everything that its numbers tell: made once, shown as a page, as words and as data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from samestep.errors import UsageError
from samestep.reporting.overlap import Collective, Overlap, calls, overlap
from samestep.reporting.run_log import RankLog, Run
from samestep.reporting.steps import RankTimes, StepTable, TimeBreakdown, account
from samestep.reporting.timeline import Gantt, gantts
from samestep.reporting.workload import Ledger, ledger


@dataclass(frozen=True)
class RunAnalysis:
    run: Run  # that it is of
    number: int  # of the attempt
    logs: tuple[RankLog, ...]  # of its ranks, in their order; none where no rank has written anything

    @cached_property
    def table(self) -> StepTable:
        return StepTable.of(self.logs)

    @cached_property
    def account(self) -> TimeBreakdown:
        about = self.run.about
        ended = about.get("ended") if about.get("exit") and self.number == max(self.run.attempts, default=0) else None
        return account(self.table, self.logs, ended if isinstance(ended, float) and math.isfinite(ended) else None)

    @cached_property
    def pace(self) -> RankTimes:
        return RankTimes(self.table.steady)

    @cached_property
    def ledger(self) -> Ledger | None:
        return ledger(self.table, self.logs)

    @cached_property
    def overlap(self) -> Overlap | None:
        return overlap(self.logs)

    @cached_property
    def calls(self) -> list[Collective]:
        return calls(self.logs)

    @cached_property
    def gantts(self) -> list[Gantt]:
        return gantts(self.logs)

    @property
    def is_staged(self) -> bool:
        """Whether ranks hold different stages of a model: they differ by design then."""
        return bool(self.gantts)

    @property
    def steps(self) -> int:
        """How many steps the ranks have finished in this attempt."""
        return max((sum(line["steps"] for line in log.steps) for log in self.logs), default=0)

    @property
    def last_step(self) -> int:
        """The number of the last one, which counts from the run's first attempt."""
        return max((log.step for log in self.logs), default=0)

    @property
    def size(self) -> int:
        """How many ranks there are meant to be."""
        sizes: list[int] = [log.begin["size"] for log in self.logs if log.begin]
        ranks = self.run.about.get("ranks")
        return max([*sizes, len(self.logs), ranks if isinstance(ranks, int) and not sizes else 0])


def analyse(run: Run, number: int | None = None) -> RunAnalysis:
    """Returns an attempt, the last one by default."""
    attempts = run.attempts
    if number is None:
        number = attempts[-1] if attempts else 0
    elif number not in attempts:
        there = ", ".join(map(str, attempts))
        hint = f"its attempts are {there}" if len(attempts) > 1 else f"its only one is {there}"
        raise UsageError(
            f"there is no attempt {number} of this run; {hint if there else 'no rank has written an event'}"
        )
    return RunAnalysis(run, number, tuple(run.attempt(number)))
