"""What holds for a model in stages: its ranks have the bits of one process that takes the same micro-batches.

    rank 0, stage 0   0.weight  ┐                                       ┌ 0.weight
    rank 1, stage 1   3.weight  ┴── together, step by step, bit for bit ┴ 3.weight   one process, all stages on it

Each rank has a part of the parameters, so ranks are compared with one process and not with each other. The script's own
dropout is on. With several replicas sums are taken in another order, and bits are other ones: replicas are compared
with each other, bit for bit, and their gradients with those of one process, both in float64 and without dropout.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from samestep.verification import numerics
from samestep.verification.equality import MOST_STEPS, failed
from samestep.verification.findings import AGREES, PROVED, Finding, unchecked
from samestep.verification.journal import Event
from samestep.verification.judging.record import Record
from samestep.verification.judging.states import scheduled, several, staged
from samestep.verification.judging.words import plural
from samestep.verification.report import Report
from samestep.verification.runner import Runner

if TYPE_CHECKING:
    from torch import Tensor

__all__: list[str] = []

_PROVED = ("initial_state", "parameter_order", "gradients", "updates", "parameters", "data", "random", "pipeline")
_KEYS = ("parameters", "gradients", "after")
_NUMBER = re.compile(r"^model \d+: ")


def judge(runner: Runner, record: Record, report: Report) -> None:
    """Runs the script twice more, on as many ranks and on one, and compares what they step with."""
    told = staged(record)
    if told is None or report.errors:
        return
    if told["replicas"] > 1:
        _judge_replicas(runner, told, min(record.steps, MOST_STEPS), report)
        return
    order: dict[str, Any] = {
        "steps": min(record.steps, MOST_STEPS),
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
        length = f"{plural(steps, 'step')} of {plural(told['micro_batches'], 'micro-batch')}"
        report.margins["pipeline"] = (
            f"{plural(told['stages'], 'stage')} and one process have the same bits in all gradients and parameters "
            f"({length}, with the script's own dropout)"
        )
        return
    step, tensor, why = found
    cause = f"{plural(told['stages'], 'stage')} and one process with the same micro-batches {why} at step {step}"
    report.add([_inexact(told, step, tensor, cause)])


def judge_devices(runner: Runner, record: Record, report: Report) -> None:
    """Judges processes that hold all stages each: as replicas, and beside the same with one stage, on one device."""
    told = several(record)
    if told is None or report.errors:
        return
    if told["replicas"] > 1:
        _judge_replicas(runner, {**told, "stages": told["held"]}, min(record.steps, MOST_STEPS), report)
        if report.errors:
            return
    order: dict[str, Any] = {
        "steps": min(record.steps, MOST_STEPS),
        "micro_batches": told["micro_batches"],
        "chance": True,
    }
    what = f"{plural(told['held'], 'stage')} of a process"
    many = runner.recorded(f"{what} with their dropout", runner.ranks, **order)
    one = runner.recorded("one stage a process with the same micro-batches", runner.ranks, one=True, **order)
    if reason := failed(many) or failed(one):
        report.cover("pipeline", unchecked(f"not compared with one device: {reason}"))
        return
    steps = min(many.record.steps, one.record.steps)
    if not steps:
        report.cover("pipeline", unchecked("on one device the script took no step"))
        return
    for ours, theirs in zip(many.record.ranks, one.record.ranks, strict=True):
        for step, tensor, why in differences([ours.steps], theirs.steps):
            cause = f"{what} and the same on one device, as one stage, {why} at step {step} on rank {ours.number}"
            report.add([replace(_inexact(told, step, tensor, cause), rank=ours.number)])
            return
    for name in ("pipeline", "random"):
        report.cover(name, PROVED)
    report.margins["pipeline"] = (
        f"{what}, each on its device, and one stage on one device have the same bits in all gradients and parameters "
        f"({plural(steps, 'step')} of {plural(told['micro_batches'], 'micro-batch')}, with the script's own dropout)"
    )


def _inexact(told: Event, step: int, tensor: str, cause: str) -> Finding:
    return Finding(
        code="pipeline-inexact",
        step=step,
        tensor=tensor,
        where=told["where"],
        cause=cause,
        fix="samestep verify --explain pipeline-inexact",
    )


# --- several replicas ---------------------------------------------------------------------------------


def _judge_replicas(runner: Runner, told: Event, steps: int, report: Report) -> None:
    order: dict[str, Any] = {"steps": steps, "micro_batches": told["micro_batches"], "double": True}
    what = f"{told['replicas']} replicas of {plural(told['stages'], 'stage')}"
    many = runner.recorded(f"{what} in float64", runner.ranks, everywhere=True, **order)
    one = runner.recorded("one process in float64, with whole batches", 1, **order)
    if reason := failed(many) or failed(one):
        report.cover("pipeline", unchecked(f"not compared in float64: {reason}"))
        return
    unlike = next(unlike_replicas([rank.steps for rank in many.record.ranks]), None)
    if unlike is not None:
        step, tensor, ranks = unlike
        cause = f"{what}: behind step {step} ranks {ranks[0]} and {ranks[1]} have other bits in {tensor}, which is one"
        report.add([_inexact(told, step, tensor, cause)])
        return
    worst, compared = 0.0, 0
    for step, ours, theirs in _gradients(many.record, one.record):
        apart = numerics.distance(ours, theirs)
        worst, compared = max(worst, apart.worst), compared + 1
        if apart.worst > numerics.limit(0.0, theirs):
            tensor = apart.tensor
            cause = (
                f"{what} in float64: at step {step} the gradient of {tensor} is {apart.worst:.1e} of its norm away "
                "from that of one process with the whole batch"
            )
            report.add([_inexact(told, step, tensor, cause)])
            return
    for step, ours, theirs in _updates(many.record, one.record):
        apart = numerics.distance(ours, theirs)
        if apart.worst > numerics.limit(0.0, theirs):
            cause = (
                f"{what} in float64: behind step {step} {apart.tensor} is {apart.worst:.1e} of its norm away from that "
                "of one process with the whole batch"
            )
            report.add([_inexact(told, step, apart.tensor, cause)])
            return
    if not compared:
        report.cover("pipeline", unchecked("no stage and one process have kept the gradients of the same step"))
        return
    for name in ("gradients", "updates", "parameters", "initial_state", "parameter_order", "data"):
        report.cover(name, AGREES)
    report.cover("pipeline", AGREES)
    without = f"dropout and {told['codec']}" if told["codec"] else "dropout"
    report.margins["pipeline"] = (
        f"{what} and one process with whole batches, in float64, without {without}: gradients within {worst:.1e} of a "
        f"tensor's norm at {plural(compared, 'step')}; replicas have the same bits in all parameters"
    )
    if told["codec"]:
        report.cover("gradients", unchecked(f"before {told['codec']} they agree; what it makes of them is not seen"))


def unlike_replicas(ranks: Sequence[Sequence[Event]]) -> Iterator[tuple[int, str, tuple[int, int]]]:
    """Yields step, tensor and two ranks, where ranks that step the same parameter do not come to the same bits.

    Args:
        ranks: by rank, its steps.
    """
    for number, events in enumerate(zip(*ranks, strict=False)):
        known: dict[str, tuple[Any, int]] = {}
        for rank, event in enumerate(events):
            after, own = _bare(event["after"]), _bare(event["gradients"])
            for name in own:
                value, first = known.setdefault(name, (after.get(name), rank))
                if value != after.get(name):
                    yield number, name, (first, rank)


def _gradients(many: Record, one: Record) -> Iterator[tuple[int, dict[str, Tensor | None], dict[str, Tensor | None]]]:
    """Yields step and the gradients of the ranks together and of one process, where both have kept them."""
    for number, theirs in enumerate(one.ranks[0].steps[: min(many.steps, one.steps)]):
        events = [(rank.number, rank.steps[number]) for rank in many.ranks]
        if theirs["kept"] is None or any(event["kept"] is None for _, event in events):
            continue
        right = _bare(one.value(0, theirs["kept"]))
        ours: dict[str, Tensor | None] = {}
        for rank, event in events:
            ours = _bare(many.value(rank, event["kept"])) | ours
        yield number, {name: ours.get(name) for name in right}, right


def _updates(many: Record, one: Record) -> Iterator[tuple[int, dict[str, Tensor | None], dict[str, Tensor | None]]]:
    """Yields step and the parameters behind it, of the ranks together and of one process, where both have kept them."""
    for theirs in one.ranks[0].steps[: min(many.steps, one.steps)]:
        if many.updated(theirs) is not None and one.updated(theirs) is not None:
            right = _bare(one.update(theirs)["parameters"])
            ours = _bare(many.update(theirs)["parameters"])
            yield theirs["event"], {name: ours[name] for name in right if name in ours}, right


# --- torch.distributed.pipelining -----------------------------------------------------------------------


def judge_scheduled(record: Record, report: Report) -> None:
    """Judges steps that were computed once more without micro-batches (see :mod:`samestep.instrument.pipelining`)."""
    told = scheduled(record)
    reason = next((event["why"] for _, event in told if event["why"] is not None), None)
    if reason is not None:
        for name in ("gradients", "pipeline"):
            report.cover(name, unchecked(reason))
        return
    for rank, event in told:
        if event["worst"] > numerics.ROUNDINGS * event["unit"]:
            cause = (
                f"at step {event['step']} the gradient of {event['tensor']} on rank {rank} is {event['worst']:.1e} of "
                f"its norm away from that of the whole batch: {plural(event['micro_batches'], 'micro-batch')} of "
                f"{plural(event['stages'], 'stage')} are not that batch (means of unlike micro-batches, a wrong scale)"
            )
            found = _inexact(event, event["step"], event["tensor"], cause)
            report.add([replace(found, rank=rank)])
            return
    worst = max(event["worst"] for _, event in told)
    steps = len({event["step"] for _, event in told})
    for name in ("gradients", "pipeline"):
        report.cover(name, AGREES)
    report.margins["pipeline"] = (
        f"gradients within {worst:.1e} of a tensor's norm of those of whole batches, {plural(steps, 'step')}"
    )
    for name in ("data", "initial_state", "parameters"):
        report.cover(name, unchecked("stages have no other rank to be compared with"))
    report.cover("data", unchecked("the first stage's inputs and the last's targets come from different ranks"))


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
