"""Gradients of N ranks beside those of one process that takes N steps, with its own samples, for one of the ranks'.

    2 ranks        step 0: samples 0-3 and 4-7       step 1: samples 8-11 and 12-15
    one process    0-3    4-7                        8-11   12-15

So it is where a script cuts its data by itself and the size of a process's batches is given. Each of the steps begins
with the parameters that the ranks' step begins with, so its gradients add up to theirs, with a weight for each. That
they do shows that the samples are the same; what the weights should be, the losses tell: means of as many values count
alike, and together once.
"""

from __future__ import annotations

from dataclasses import dataclass

from samestep.text import plural
from samestep.verification import numerics
from samestep.verification.findings import DECLARED
from samestep.verification.journal import Event
from samestep.verification.judging import means
from samestep.verification.judging.average import clipping, scaled
from samestep.verification.judging.record import Record
from samestep.verification.judging.single import Run
from samestep.verification.report import Report

__all__: list[str] = []

REMARK = (
    "the samples come from no DataLoader, and one process has as many in a step as one rank: gradients were compared "
    "with the weighted sum of those of one process in so many steps as there are ranks"
)
_NEAR = 1e-3  # of a weight


@dataclass(frozen=True)
class _Sum:
    """The ranks' gradient as a sum of those of one process.

    Attributes:
        step: of the ranks.
        weights: of each.
        left: what it does not explain, of the gradient's norm.
        clipped: by what the ranks' gradient was multiplied; None where that is not known.
    """

    step: Event
    weights: tuple[float, ...]
    left: float
    clipped: float | None

    @property
    def total(self) -> float:
        """The weights together, clipping apart."""
        return sum(self.weights) / (self.clipped or 1.0)

    @property
    def are_equal(self) -> bool:
        """Whether the ranks count alike."""
        return all(abs(one / self.weights[0] - 1) < _NEAR for one in self.weights)

    @property
    def is_mean(self) -> bool:
        """Whether the weights are those of a mean; after clipping by an unknown norm they may be smaller."""
        return abs(self.total - 1) < _NEAR or (self.clipped is None and self.total < 1)


def judge(record: Record, run: Run, steps: list[Event], report: Report) -> bool:
    """Adds what the comparison at these steps tells; returns whether it tells anything."""
    taken = [step for step in steps if len(run.turns(step["event"])) == len(record.data.ranks)]
    sums = [_sum(record, run, step) for step in taken]  # a script may be over before
    known = [one for one in sums if one is not None and one.weights]
    if len(sums) > len([one for one in sums if one is not None]) or not known:
        return False
    for one in known:
        if one.are_equal and not means.are_alike(record, one.step):
            return False
        if not one.is_mean:
            if not one.are_equal:
                return False
            report.add([scaled(record, one.step, one.total)])
            return True
    worst = max(one.left for one in known)
    report.remarks.append(REMARK)
    report.cover("gradients", DECLARED, f"worst error {worst:.1e}, {plural(len(known), 'step')}")
    return True


def _sum(record: Record, run: Run, step: Event) -> _Sum | None:
    """How the gradient of a step adds up, without weights where there is none; None where it does not."""
    recorded, parts = record.gradients(step), run.turns(step["event"])
    ours = numerics.flat(recorded, *parts)
    theirs = [numerics.flat(part, recorded, *parts) for part in parts]
    if not ours.any() and not any(one.any() for one in theirs):
        return _Sum(step, (), 0.0, None)
    found = numerics.fit(ours, theirs)
    if not found.left <= numerics.limit(0.0, recorded) or not all(weight > 0 for weight in found.factors):
        return None
    return _Sum(step, found.factors, found.left, clipping(record, step))
