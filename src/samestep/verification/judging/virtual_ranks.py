"""Whether the ranks' gradient is the average of virtual ranks', where one process cannot be given all samples.

A script that cuts its data by rank without a DataLoader trains on other samples when it runs alone. So each rank's part
is computed by a process that takes itself for that rank. What this leaves open is said: whether the average over ranks
is that over samples.
"""

from __future__ import annotations

from collections.abc import Callable

from samestep.verification import numerics
from samestep.verification.findings import DECLARED, Finding, unchecked
from samestep.verification.journal import Event
from samestep.verification.judging.record import Record
from samestep.verification.judging.single import Run
from samestep.verification.judging.words import plural
from samestep.verification.report import Report

__all__: list[str] = []

EVERY_ZERO = "every gradient is zero, on the ranks and in one process"

_NEAR = 1e-3  # of a factor
_REMARK = (
    "the samples come from no DataLoader, and one process cuts them otherwise: gradients were compared with the "
    "average of virtual ranks, which leaves open whether ranks with different numbers of samples are weighed by them"
)


class VirtualRanks:
    """Of the ranks with processes that take themselves for them."""

    def __init__(self, record: Record, runs: Callable[[], list[Run]]) -> None:
        self._record = record
        self._runs = runs

    def judge(self, steps: list[Event], report: Report) -> None:
        """Adds what the comparison at these steps tells."""
        runs = self._runs()
        common = [event for event in steps if runs and all(event["event"] in run.steps for run in runs)]
        if not common:
            why = "the samples come from no DataLoader, one process cuts them otherwise, and no virtual rank ran"
            report.cover("gradients", unchecked(why))
            return
        worst, seen = 0.0, False
        for event in common:
            number = event["event"]
            recorded = self._record.gradients(event)
            parts = [numerics.flat(run.gradients(number), recorded) for run in runs]
            ours, together = numerics.flat(recorded, recorded), sum(parts[1:], parts[0])
            if not (ours.any() or together.any()):
                continue  # no gradient on either side, and no factor between them
            seen = True
            found = numerics.fit(ours, [together])
            if not numerics.are_finite(recorded) and not all(bool(one.isfinite().all()) for one in parts):
                why = f"from step {number} on gradients are not finite, on the ranks and on virtual ranks alike"
                report.cover("gradients", unchecked(why))
                return
            worst = max(worst, found.left)
            if found.left > numerics.limit(0.0, recorded):
                self._refuse(event, runs, found, report)
                return
            if not self._is_average(found.factors[0]):
                report.add([self._scaled(event, found.factors[0])])
                return
        if not seen:
            report.cover("gradients", unchecked(EVERY_ZERO))
            return
        report.remarks.append(_REMARK)
        margin = f"with virtual ranks, worst error {worst:.1e}, {plural(len(common), 'step')}"
        report.cover("gradients", DECLARED, margin)

    def _is_average(self, factor: float) -> bool:
        """Of whole parts, or of parts that a script's own average has divided already."""
        return any(abs(factor / right - 1) < _NEAR for right in (1.0, 1 / self._record.size))

    def _refuse(self, event: Event, runs: list[Run], found: numerics.Fit, report: Report) -> None:
        if any(rank.of("draw") for rank in self._record.ranks) or any(run.ended.code for run in runs):
            report.cover("gradients", unchecked("virtual ranks draw, or train on, something else than the ranks"))
            return
        report.add(
            [
                Finding(
                    code="gradient-differs",
                    property="gradients",
                    step=event["event"],
                    where=event["where"],
                    cause=f"at step {event['event']} the gradient is not the average of what each rank computes by "
                    f"itself: {found.left:.1e} of its norm is something else",
                    fix="average all gradients between backward and step",
                )
            ]
        )

    def _scaled(self, event: Event, factor: float) -> Finding:
        times = factor * self._record.size
        return Finding(
            code="gradient-scale",
            property="gradients",
            step=event["event"],
            factor=round(times, 6),
            where=event["where"],
            cause=f"at step {event['event']} the gradient is {times:.4g} times the average of what each rank computes",
            fix="divide the sum of all ranks by their number, once",
        )
