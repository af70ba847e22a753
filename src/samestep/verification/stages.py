"""What holds for a model in stages: its ranks have the bits of one process that takes the same micro-batches.

    rank 0, stage 0   0.weight  ┐                                       ┌ 0.weight
    rank 1, stage 1   3.weight  ┴── together, step by step, bit for bit ┴ 3.weight   one process, all stages on it

Each rank has a part of the parameters, so ranks are compared with one process and not with each other. The script's own
dropout is on. With several replicas sums are taken in another order, and bits are other ones: those are not compared
yet.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from samestep.verification.findings import PROVED, Finding, unchecked
from samestep.verification.journal import Event
from samestep.verification.judging.record import Record
from samestep.verification.judging.states import staged
from samestep.verification.judging.words import plural
from samestep.verification.report import Report
from samestep.verification.runner import Runner

__all__: list[str] = []

_MOST_STEPS = 20
_PROVED = ("initial_state", "parameter_order", "gradients", "parameters", "data", "random", "pipeline")
_KEYS = ("parameters", "gradients", "after")
_NUMBER = re.compile(r"^model \d+: ")


def judge(runner: Runner, record: Record, report: Report) -> None:
    """Runs the script twice more, on as many ranks and on one, and compares what they step with."""
    told = staged(record)
    if told is None or report.errors:
        return
    if told["replicas"] > 1:
        why = f"{told['replicas']} replicas of {told['stages']} stages: they are compared where there is one"
        report.cover("pipeline", unchecked(f"{why}, as on {told['stages']} ranks"))
        return
    order: dict[str, Any] = {
        "steps": min(record.steps, _MOST_STEPS),
        "micro_batches": told["micro_batches"],
        "chance": True,
    }
    many = runner.recorded(f"{plural(told['stages'], 'stage')} with their dropout", runner.ranks, **order).record
    one = runner.recorded("one process with the same micro-batches", 1, **order).record
    steps = min(many.steps, one.steps)
    if not steps:
        report.cover("pipeline", unchecked("one process with the same micro-batches took no step"))
        return
    found = next(differences([rank.steps for rank in many.ranks], one.ranks[0].steps), None)
    if found is None:
        for name in _PROVED:
            report.cover(name, PROVED)
        report.margins["pipeline"] = (
            f"{plural(told['stages'], 'stage')} and one process have the same bits in all gradients and parameters "
            f"({plural(steps, 'step')}, {told['micro_batches']} micro-batches each, with the script's own dropout)"
        )
        return
    step, tensor, why = found
    cause = f"{plural(told['stages'], 'stage')} and one process with the same micro-batches {why} at step {step}"
    report.add(
        [
            Finding(
                code="pipeline-inexact",
                property="pipeline",
                step=step,
                tensor=tensor,
                where=told["where"],
                cause=cause,
                fix="samestep verify --explain pipeline-inexact",
            )
        ]
    )


def differences(ranks: Sequence[Sequence[Event]], alone: Sequence[Event]) -> Iterator[tuple[int, str, str]]:
    """Yields step, tensor and what is wrong, where the ranks together are not what one process is.

    What a rank's optimizer does not hold, of the whole model that the script has made, stays as it was and is left out.

    Args:
        ranks: by rank, its steps.
        alone: those of the process.
    """
    for number, theirs in enumerate(alone):
        mine = [steps[number] for steps in ranks if number < len(steps)]
        if len(mine) < len(ranks):
            return
        own = [_bare(step["gradients"]).keys() for step in mine]
        for key in _KEYS:
            told = [_bare(step[key]) for step in mine]
            here = {name: one[name] for one, names in zip(told, own, strict=True) for name in one if name in names}
            there = _bare(theirs[key])
            for name in there:
                if name not in here:
                    yield number, name, f"do not train the same parameters: no stage has {name}"
                elif here[name] != there[name]:
                    yield number, name, f"have other bits in {name}"


def _bare(told: dict[str, Any] | None) -> dict[str, Any]:
    """Returns digests by the names of the model: on a rank it is one of two, the whole and the part."""
    return {_NUMBER.sub("", name): value for name, value in (told or {}).items()}
