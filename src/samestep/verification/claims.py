"""Pairs of runs that must agree, of scripts that use samestep and of models in stages.

Each `judge` function says what it compares: float64, virtual ranks and a resume for scripts that use samestep; stages,
devices, replicas and schedules for pipelines.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from samestep.text import plural
from samestep.verification import numerics
from samestep.verification.findings import AGREES, DECLARED, PROVED, Finding, unchecked
from samestep.verification.journal import Event
from samestep.verification.judging.others import Others
from samestep.verification.judging.record import Record, Run
from samestep.verification.judging.reference import Comparison
from samestep.verification.judging.states import scheduled, several, staged
from samestep.verification.report import Report
from samestep.verification.runner import Runner

if TYPE_CHECKING:
    from torch import Tensor

    Values = dict[str, Tensor | None]

_MAX_STEPS = 20  # of the runs that are made here
_MAX_TEXT = 500  # characters of a message
_KEYS = ("parameters", "gradients", "after")
_ALL = "name everything that changes while training in samestep.checkpoint: model, optimizer, data, schedule, average"
_NUMBER = re.compile(r"^model \d+: ")


def failed(run: Run) -> str | None:
    """Returns why a run has no steps to compare; None where it has."""
    if run.ended.hung:
        return "nothing moved any more"
    failure = run.ended.failure
    if failure is not None:
        message = failure["message"]  # its end says what to do, mostly
        return f"{failure['exception']}: {message if len(message) <= _MAX_TEXT else f'{message[:_MAX_TEXT]}…'}"
    return None if run.record.ranks and run.record.steps else "no step was seen"


def differences(
    ranks: Sequence[Sequence[Event]],
    others: Sequence[Event],
    keys: Sequence[str] = _KEYS,
    *,
    parts: bool = False,
) -> Iterator[tuple[int, str, str]]:
    """Yields step, tensor and what is wrong, where ranks together do not have the bits of another run.

    Args:
        ranks: by rank, its steps.
        others: the steps of one process of the other run.
        keys: what is compared: the parameters before a step, its gradients, the parameters "after" it.
        parts: each rank has a part of the model, which its optimizer holds; what else there is of the model in its
            process stays as it was, and is left out.
    """
    for theirs, *mine in zip(others, *ranks, strict=False):
        for key in keys:
            here: dict[str, Any] = {}
            for step in mine:
                own = _bare(step["gradients"])
                here |= {name: one for name, one in _bare(step[key]).items() if not parts or name in own}
            for name, value in _bare(theirs[key]).items():
                if here.get(name, value) != value:
                    yield mine[0]["event"], name, f"have other bits in {name}"
                elif parts and name not in here:
                    yield mine[0]["event"], name, f"do not train the same parameters: no stage has {name}"


def _bare(digests: dict[str, Any] | None) -> dict[str, Any]:
    """Returns digests by the names of the model: on a rank it is one of two, the whole and the part."""
    return {_NUMBER.sub("", name): value for name, value in (digests or {}).items()}


# --- scripts that use samestep ------------------------------------------------------------------------


def judge(runner: Runner, record: Record, report: Report) -> None:
    """Checks the claims of a script that uses samestep, where no error has been found."""
    called = [event for rank in record.ranks for event in rank.of("called")]
    used, saves = {event["name"] for event in called}, any(event["saves"] for event in called)
    if report.errors or not {"shards", "replicate"} <= used or not record.steps:
        return
    steps = min(record.asked, _MAX_STEPS)
    for kind, how in (("compresses", "not compressed"), ("local_steps", "averaged at every step")):
        if any(rank.of(kind) for rank in record.ranks):
            report.remarks.append(f"in float64, and as virtual ranks, gradients are {how}")
    judge_in_float64(runner, steps, report)
    if not report.errors:
        judge_virtual_ranks(runner, record.size, steps, report)
    if not report.errors and saves:
        judge_resume(runner, record, report)


def judge_in_float64(runner: Runner, steps: int, report: Report) -> None:
    """Compares the ranks with one process, both in float64, whose rounding is a billion times smaller."""
    ranks = runner.recorded(f"recording {runner.ranks} ranks in float64", runner.ranks, steps=steps, double=True)

    def alone(name: str = "", chosen: list[int] | None = None, **order: Any) -> Run:
        return runner.alone(f"in float64{name}", ranks.record, chosen, double=True, **order)

    whole = alone()
    if reason := failed(ranks) or failed(whole):
        report.remarks.append(f"not compared in float64: {reason}")
        return
    found = Report(ranks=report.ranks, steps=ranks.record.steps)
    others = Others(
        permuted=lambda: alone(", another order", permuted=True),
        of_ranks=lambda: [alone(f", samples of rank {one.number}", [one.number]) for one in ranks.record.ranks],
        own_lengths=lambda: alone(", with lengths of its own", own_lengths=True),
    )
    Comparison(ranks.record, whole, others).judge(found)
    report.add(found.errors)
    state = found.coverage.get("gradients")
    if state in {AGREES, DECLARED}:
        report.remarks.append(f"in float64 ranks and one process agree: {found.margins['gradients']}")
    elif not found.errors:
        report.remarks.append(f"not compared in float64: {state}")


def judge_virtual_ranks(runner: Runner, size: int, steps: int, report: Report) -> None:
    """Compares the bits of `size` processes and of one, both as virtual ranks, with the script's own dropout."""
    if size & (size - 1):
        report.remarks.append(f"not compared bit for bit with virtual ranks: {size} is no power of two")
        return
    order: dict[str, Any] = {"steps": steps, "virtual_ranks": size, "chance": True}
    many = runner.recorded(f"{size} ranks as {size} virtual ranks", size, **order)
    one = runner.recorded(f"one process as {size} virtual ranks", 1, **order)
    if reason := failed(many) or failed(one):
        report.remarks.append(f"not compared bit for bit with virtual ranks: {reason}")
        return
    both = f"as {size} virtual ranks, {size} processes and one have"
    for step, tensor, _ in differences([many.record.ranks[0].steps], one.record.ranks[0].steps):
        cause = f"{both} other bits in {tensor} at step {step}"
        report.add([Finding(code="gradient-differs", step=step, tensor=tensor, cause=cause)])
        return
    count = plural(min(many.record.steps, one.record.steps), "step")
    report.remarks.append(
        f"{both} the same bits in all gradients and parameters ({count}, with the script's own dropout)"
    )


def judge_resume(runner: Runner, record: Record, report: Report) -> None:
    """Kills a rank after a save, resumes, and compares with a run that was not killed."""
    size, limit = record.size, record.asked
    order: dict[str, Any] = {"every": max(1, limit // 4), "saves": str(runner.folder / "resumed")}
    if size > 2:  # two numbers have one sum; the order of three shows in its bits
        order["ordered"] = True
        record = runner.recorded("not killed, added in rank order", size, steps=limit, ordered=True).record
    whole = record.ranks[0].steps[:limit] if record.ranks else []
    killed = runner.recorded("rank 0 killed after a save", size, killed_at=max(2, limit // 2), **order)
    if not any(rank.of("killed") for rank in killed.record.ranks):  # it has ended, or something else has ended it
        why = failed(killed) or "the training ended before a checkpoint was complete"
        report.cover("checkpoint", unchecked(why))
        return
    run = runner.recorded("resuming", size, steps=limit, **order)
    steps = run.record.ranks[0].steps if run.record.ranks else []
    if not steps:
        report.cover("checkpoint", unchecked(f"nothing was trained after the resume: {failed(run)}"))
        return
    begun = next((step["event"] for step in whole if not [*differences([[step]], steps[:1], ("parameters",))]), None)
    last = killed.record.steps
    if not begun:
        where = "at the beginning" if begun == 0 else "from parameters that the run which was not killed never had"
        cause = f"rank 0 was killed after {last} steps, behind a save, and the run resumed {where}"
        report.add([Finding(code="checkpoint-inexact", step=last, cause=cause)])
        return
    for step, tensor, _ in differences([whole[begun:]], steps):
        cause = f"resumed at step {begun}, the run has other bits in {tensor} at step {step} than without a stop"
        report.add([Finding(code="checkpoint-inexact", step=step, tensor=tensor, cause=cause, fix=_ALL)])
        return
    end = min(len(whole), begun + len(steps)) - 1
    margin = f"rank 0 killed after {last} steps; resumed at step {begun}, the same bits to step {end}"
    report.cover("checkpoint", PROVED, margin)


# --- models in stages ---------------------------------------------------------------------------------


def judge_stages(runner: Runner, record: Record, report: Report) -> None:
    """Compares ranks that hold a stage each with one process."""
    event = staged(record)
    if event is None or report.errors:
        return
    if event["replicas"] > 1:
        _judge_replicas(runner, event, record, report)
        return
    what, order = plural(event["stages"], "stage"), _order(event, record, chance=True)
    many = runner.recorded(f"{what} with their dropout", runner.ranks, **order).record
    one = runner.recorded("one process with the same micro-batches", 1, **order).record
    if not min(many.steps, one.steps):
        report.cover("pipeline", unchecked("one process with the same micro-batches took no step"))
        return
    found = differences([rank.steps for rank in many.ranks], one.ranks[0].steps, parts=True)
    for step, tensor, why in found:
        cause = f"{what} and one process with the same micro-batches {why} at step {step}"
        report.add([_inexact(event, step, tensor, cause)])
        return
    _cover_bits(report, event, f"{what} and one process", min(many.steps, one.steps))
    for name in ("initial_state", "parameter_order", "gradients", "updates", "parameters", "data"):
        report.cover(name, PROVED)


def judge_devices(runner: Runner, record: Record, report: Report) -> None:
    """Compares processes that hold all stages with each other, and with one stage on one device."""
    event = several(record)
    if event is None or report.errors:
        return
    if event["replicas"] > 1:
        _judge_replicas(runner, {**event, "stages": event["held"]}, record, report)
        if report.errors:
            return
    what, order = f"{plural(event['held'], 'stage')} of a process", _order(event, record, chance=True)
    many = runner.recorded(f"{what} with their dropout", runner.ranks, **order)
    one = runner.recorded("one stage a process with the same micro-batches", runner.ranks, one=True, **order)
    if reason := failed(many) or failed(one):
        report.cover("pipeline", unchecked(f"not compared with one device: {reason}"))
        return
    for ours, theirs in zip(many.record.ranks, one.record.ranks, strict=True):
        for step, tensor, why in differences([ours.steps], theirs.steps, parts=True):
            cause = f"{what} and the same on one device, as one stage, {why} at step {step} on rank {ours.number}"
            report.add([_inexact(event, step, tensor, cause, rank=ours.number)])
            return
    both = f"{what}, each on its device, and one stage on one device"
    _cover_bits(report, event, both, min(many.record.steps, one.record.steps))


def _order(event: Event, record: Record, **order: Any) -> dict[str, Any]:
    return {"steps": min(record.steps, _MAX_STEPS), "micro_batches": event["micro_batches"], **order}


def _cover_bits(report: Report, event: Event, both: str, steps: int) -> None:
    length = f"{plural(steps, 'step')} of {plural(event['micro_batches'], 'micro-batch')}"
    margin = f"{both} have the same bits in all gradients and parameters ({length}, with the script's own dropout)"
    report.cover("pipeline", PROVED, margin)
    report.cover("random", PROVED)


def _inexact(event: Event, step: int, tensor: str, cause: str, *, rank: int | None = None) -> Finding:
    return Finding(
        code="pipeline-inexact",
        rank=rank,
        step=step,
        tensor=tensor,
        where=event["where"],
        cause=cause,
        fix="samestep verify --explain pipeline-inexact",
    )


def _judge_replicas(runner: Runner, event: Event, record: Record, report: Report) -> None:
    what, order = (
        f"{event['replicas']} replicas of {plural(event['stages'], 'stage')}",
        _order(event, record, double=True),
    )
    many = runner.recorded(f"{what} in float64", runner.ranks, everywhere=True, **order)
    one = runner.recorded("one process in float64, with whole batches", 1, **order)
    if reason := failed(many) or failed(one):
        report.cover("pipeline", unchecked(f"not compared in float64: {reason}"))
        return
    for step, tensor, ranks in unlike_replicas([rank.steps for rank in many.record.ranks]):
        cause = f"{what}: behind step {step} ranks {ranks[0]} and {ranks[1]} have other bits in {tensor}, which is one"
        report.add([_inexact(event, step, tensor, cause)])
        return
    worst, compared = 0.0, 0
    for of, step, ours, theirs in chain(_gradients(many.record, one.record), _updates(many.record, one.record)):
        found = numerics.distance(ours, theirs)
        if found.worst > numerics.limit(0.0, theirs):
            cause = (
                f"{what} in float64: {of.format(step)} {found.tensor} is {found.worst:.1e} of its norm away from that "
                "of one process with the whole batch"
            )
            report.add([_inexact(event, step, found.tensor, cause)])
            return
        if of == _OF_GRADIENTS:
            worst, compared = max(worst, found.worst), compared + 1
    if not compared:
        report.cover("pipeline", unchecked("no stage and one process have kept the gradients of the same step"))
        return
    without = f"dropout and {event['codec']}" if event["codec"] else "dropout"
    margin = (
        f"{what} and one process with whole batches, in float64, without {without}: gradients within {worst:.1e} of a "
        f"tensor's norm at {plural(compared, 'step')}; replicas have the same bits in all parameters"
    )
    report.cover("pipeline", AGREES, margin)
    for name in ("gradients", "updates", "parameters", "initial_state", "parameter_order", "data"):
        report.cover(name, AGREES)
    if event["codec"]:
        report.cover("gradients", unchecked(f"before {event['codec']} they agree; what it makes of them is not seen"))


def unlike_replicas(ranks: Sequence[Sequence[Event]]) -> Iterator[tuple[int, str, tuple[int, int]]]:
    """Yields step, tensor and two ranks, where ranks that step the same parameter do not come to the same bits."""
    for number, events in enumerate(zip(*ranks, strict=False)):
        known: dict[str, tuple[Any, int]] = {}
        for rank, event in enumerate(events):
            after = _bare(event["after"])
            for name in _bare(event["gradients"]):
                value, first = known.setdefault(name, (after.get(name), rank))
                if value != after.get(name):
                    yield number, name, (first, rank)


_OF_GRADIENTS = "at step {} the gradient of"


def _gradients(many: Record, one: Record) -> Iterator[tuple[str, int, Values, Values]]:
    """Yields the gradients of the ranks together and of one process, where both have kept them."""
    for number, theirs in enumerate(one.ranks[0].steps[: min(many.steps, one.steps)]):
        events = [(rank.number, rank.steps[number]) for rank in many.ranks]
        if theirs["kept"] is None or any(event["kept"] is None for _, event in events):
            continue
        right = _bare(one.value(0, theirs["kept"]))
        ours: Values = {}
        for rank, event in events:
            ours = _bare(many.value(rank, event["kept"])) | ours
        yield _OF_GRADIENTS, number, {name: ours.get(name) for name in right}, right


def _updates(many: Record, one: Record) -> Iterator[tuple[str, int, Values, Values]]:
    """Yields the parameters after a step, likewise."""
    for theirs in one.ranks[0].steps[: min(many.steps, one.steps)]:
        if many.updated(theirs) is not None and one.updated(theirs) is not None:
            ours, right = (_bare(each.update(theirs)["parameters"]) for each in (many, one))
            yield "behind step {}", theirs["event"], {name: ours[name] for name in right if name in ours}, right


def judge_schedules(record: Record, report: Report) -> None:
    """Reports on steps that :mod:`samestep.instrument.pipelining` has computed again without micro-batches."""
    computed = scheduled(record)
    reason = next((event["why"] for _, event in computed if event["why"] is not None), None)
    if reason is not None:
        for name in ("gradients", "pipeline"):
            report.cover(name, unchecked(reason))
        return
    for rank, event in computed:
        if event["worst"] > numerics.ROUNDINGS * event["unit"]:
            cause = (
                f"at step {event['step']} the gradient of {event['tensor']} on rank {rank} is {event['worst']:.1e} of "
                f"its norm away from that of the whole batch: {plural(event['micro_batches'], 'micro-batch')} of "
                f"{plural(event['stages'], 'stage')} are not that batch (means of unlike micro-batches, a wrong scale)"
            )
            report.add([_inexact(event, event["step"], event["tensor"], cause, rank=rank)])
            return
    worst, steps = max(event["worst"] for _, event in computed), len({event["step"] for _, event in computed})
    margin = f"gradients within {worst:.1e} of a tensor's norm of those of whole batches, {plural(steps, 'step')}"
    report.cover("pipeline", AGREES, margin)
    report.cover("gradients", AGREES)
    for name in ("initial_state", "parameters"):
        report.cover(name, unchecked("stages have no other rank to be compared with"))
    report.cover("data", unchecked("the first stage's inputs and the last's targets come from different ranks"))
