"""The gradients of steps that a script takes by its own code, which may average, or divide, only while it steps.

    .grad of each rank        after the script's all_reduce and division     its mean
                              after the all_reduce alone: p -= lr * p.grad / N     N times its mean
                              the rank's own: averaged in a flat buffer     itself

So what lay there before a step is judged by its direction, and its scale by the update that the step makes of it.
"""

from __future__ import annotations

from dataclasses import replace

from samestep.verification import numerics
from samestep.verification.findings import AGREES, PROVED, REFUTED, unchecked
from samestep.verification.journal import Event
from samestep.verification.judging.record import Record
from samestep.verification.judging.single import Run
from samestep.verification.judging.words import plural
from samestep.verification.report import Report

__all__: list[str] = []

_NEAR = 1e-3  # of a factor
_ANY = 0.0  # of gradients that are zero on both sides
REMARK = "no optimizer of torch.optim steps: a step is a change of parameters in place behind a backward pass"
_SCALED = "before a step gradients are {:.4g} times one process's, and whether the step makes up for that is not known"
_WEIGHED = "one process's is a sum of the ranks', with weights that the step gives them"
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
    told = {_factor(record, whole, step) for step in steps} - {_ANY}
    factor = told.pop() if len(told) == 1 else None if told else 1.0
    if factor is not None and factor != 1.0:
        if agree:
            return replace(record, scale=1 / factor)
        if report.coverage.get("updates") != REFUTED:
            report.cover("gradients", unchecked(_SCALED.format(factor)))
            return None
    if factor is not None or not any(_are_apart(record, step) for step in steps):
        return record
    if agree and (weights := [_weights(record, whole, step) for step in steps]) and None not in weights:
        report.cover("gradients", AGREES, f"{_WEIGHED}, {plural(len(steps), 'step')}")
    else:
        report.cover("gradients", unchecked(_OTHER))
    return None


def _are_apart(record: Record, step: Event) -> bool:
    told = [rank.steps[step["event"]]["gradients"] for rank in record.ranks]
    return any(len({one.get(name) for one in told}) > 1 for name in step["gradients"])


def _factor(record: Record, whole: Run, step: Event) -> float | None:
    """Returns how many times one process's the ranks' mean is: 1, their number, or one by it; None where it is not."""
    mean, alone = numerics.mean(record.parts(step)), whole.gradients(step["event"])
    ours, theirs = numerics.flat(mean, alone), numerics.flat(alone, mean)
    if not ours.any() and not theirs.any():
        return _ANY
    found = numerics.fit(ours, [theirs])
    size = float(record.size)
    return next((one for one in (1.0, size, 1 / size) if abs(found.factors[0] / one - 1) < _NEAR), None)


def _weights(record: Record, whole: Run, step: Event) -> tuple[float, ...] | None:
    """Returns the ranks' weights in one process's gradient; None where it is no sum of theirs."""
    parts, alone = record.parts(step), whole.gradients(step["event"])
    found = numerics.fit(numerics.flat(alone, *parts), [numerics.flat(one, alone, *parts) for one in parts])
    is_sum = found.left <= numerics.limit(0.0, alone) and all(one > 0 for one in found.factors)
    return found.factors if is_sum else None
