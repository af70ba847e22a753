"""Whether one process that goes its own way, with samples and draws of its own, steps with the ranks' gradients.

Then it is one training, whatever the ranks cut or draw, and however their gradients are made: by an evolution strategy,
say, without a backward pass, or by an optimizer that keeps them to itself, whose steps are compared instead. Rounding
adds up from step to step, so a difference tells nothing.
"""

from __future__ import annotations

from samestep.text import plural
from samestep.verification import numerics
from samestep.verification.findings import AGREES
from samestep.verification.journal import Event
from samestep.verification.judging.record import Record
from samestep.verification.report import Report

__all__: list[str] = []

_FEWEST = 2  # steps: the second one shows what the first has made


def judge(record: Record, alone: Record, steps: list[Event], report: Report) -> None:
    """Adds that the gradients of these steps, whose values were kept, are those of one process, if they are."""
    worst = worst_error(record, alone, steps)
    if worst is not None:
        told = f"worst error {worst:.1e}, {plural(len(steps), 'step')} of one process that goes its own way"
        report.cover("gradients", AGREES, told)


def worst_error(record: Record, alone: Record, steps: list[Event]) -> float | None:
    """Returns how far the gradients are apart at most; None where rounding does not explain it, or too few are known.

    Args:
        record: of the ranks.
        alone: of one process that goes its own way.
        steps: of the ranks, whose values were kept.
    """
    theirs = {step["event"]: step for rank in alone.ranks for step in rank.steps if step["kept"] is not None}
    worst, seen = 0.0, 0
    for step in steps:
        other = theirs.get(step["event"])
        if other is None:
            continue
        if other["optimizer"] != step["optimizer"]:
            return None
        ours, own = record.gradients(step), alone.gradients(other)
        if numerics.are_zero(ours) and numerics.are_zero(own):  # the optimizer asks for gradients by itself
            ours, own = _moves(record, step), _moves(alone, other)
        apart = numerics.distance(ours, own).worst
        if not apart <= numerics.limit(0.0, ours):
            return None
        worst, seen = max(worst, apart), seen + (not numerics.are_zero(ours))
    return worst if seen >= _FEWEST else None


def _moves(record: Record, step: Event) -> numerics.Gradients:
    """How far a step moves the parameters; nothing where that was not kept."""
    state = None if record.updated(step) is None else record.state(step["window"])
    if state is None:
        return {}
    before, after = state["parameters"].get(step["optimizer"], {}), record.update(step)["parameters"]
    return {name: after[name] - one for name, one in before.items() if name in after}
