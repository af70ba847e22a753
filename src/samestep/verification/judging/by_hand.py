"""Finds the gradients of steps that a script takes by its own code, which may average, or divide, while it steps.

.grad holds the mean, N times the mean, or the rank's own gradient before such a step: so its direction is compared, and
its scale by the update that the step makes of it.
"""

from __future__ import annotations

from dataclasses import replace

from samestep.text import plural
from samestep.verification import numerics
from samestep.verification.findings import AGREES, PROVED, REFUTED, unchecked
from samestep.verification.journal import Event
from samestep.verification.judging.record import Record, Run
from samestep.verification.report import Report

REMARK = "no optimizer of torch.optim steps: a step is a change of parameters in place behind a backward pass"
WITHIN = "gradients are averaged only while the optimizer steps: the mean of the ranks' own gradients was compared"
_SCALED = (
    "one process's gradients are {:.4g} times those before a step, and whether the step makes up for that is not known"
)
_WEIGHED = "one process's is a sum of the ranks', with weights that the step gives them"
_UNKNOWN = "gradients are averaged only while the optimizer steps, and what each rank had before was not kept"
_OTHER = "each rank's own code steps from a gradient of its own, and one process's is no average of them"


def as_used(record: Record, whole: Run, steps: list[Event], report: Report) -> Record | None:
    """Returns the record with gradients that may be held against one process's; None where the report has it all.

    Args:
        record: of the ranks.
        whole: the script alone.
        steps: whose gradients both have kept.
        report: knows whether the updates agree.
    """
    agree = report.coverage.get("updates") in {AGREES, PROVED}
    stepped, factors, is_far = {}, set(), False
    for step in steps:
        if not record.parts(step):
            report.cover("gradients", unchecked(_UNKNOWN))
            return None
        mean, alone = numerics.mean(record.parts(step)), whole.gradients(step["event"])
        stepped[step["event"]], near = numerics.nearest(mean, alone, record.size)
        factors |= near
        limit = numerics.limit(0.0, mean, record.sent_in(step))
        far = numerics.distance(stepped[step["event"]], alone).whole > limit
        is_far |= far and _are_apart(record, step)
    if not is_far:
        if factors <= {1.0}:
            return record
        if agree:
            return replace(record, stepped=stepped)
        if report.coverage.get("updates") == REFUTED and len(factors) == 1:
            return record
        report.cover("gradients", unchecked(_SCALED.format(max(factors, key=lambda one: abs(one - 1)))))
        return None
    if agree and None not in [_weights(record, whole, step) for step in steps]:
        report.cover("gradients", AGREES, f"{_WEIGHED}, {plural(len(steps), 'step')}")
    else:
        report.cover("gradients", unchecked(_OTHER))
    return None


def _are_apart(record: Record, step: Event) -> bool:
    ranks = [event["gradients"] for event in record.events_of_step(step["event"])]
    return any(len({digests.get(name) for digests in ranks}) > 1 for name in step["gradients"])


def _weights(record: Record, whole: Run, step: Event) -> tuple[float, ...] | None:
    """Returns the ranks' weights in one process's gradient; None where it is no sum of theirs."""
    parts, alone = record.parts(step), whole.gradients(step["event"])
    found = numerics.fit(numerics.flat(alone, *parts), [numerics.flat(one, alone, *parts) for one in parts])
    is_sum = found.left <= numerics.limit(0.0, alone) and all(one > 0 for one in found.factors)
    return found.factors if is_sum else None
