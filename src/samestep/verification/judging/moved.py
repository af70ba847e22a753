"""Whether a step does to buffers, and to models that no optimizer holds, what it does to them in one process.

Buffers are a queue of keys, a running centre, a codebook; such a model is a teacher, or an average of the weights.
Statistics of BatchNorm are left out: they are local unless the script asks for more. Those of a normalisation by the
script's own code are not, where ranks go on with rank 0's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from samestep.verification import numerics
from samestep.verification.findings import AGREES, DECLARED, Finding, unchecked
from samestep.verification.journal import Event
from samestep.verification.judging import rates, states
from samestep.verification.judging.explanations import CARRIED
from samestep.verification.judging.record import Record, Run, place_of_draw
from samestep.verification.recording.evaluations import STATISTICS
from samestep.verification.recording.optimizers import TRAINED
from samestep.verification.report import Report

_OF_A_STEP = 1e-2  # of what a step adds to averaged parameters
_OTHER_SHARE = 0.05  # of what a step adds in one process
_ROUNDINGS = 10.0  # of a parameter: what a step adds to it may be smaller
_BY_OWN_CODE = "the script's own code steps {}, beside an optimizer, by a multiple of what it does in one process"
_FEWEST = 8  # numbers, or what is added may be a multiple by chance
_SEVERAL = 2  # integers; one alone may count calls, or places in a queue
_OF_COUNTS = 0.05  # of the norm of integers


def judge(record: Record, whole: Run, own_pace: Callable[[], Record], report: Report) -> None:
    """Adds what the buffers tell, where the gradients are known to be those of one process.

    `own_pace` records one process at its own pace.
    """
    if report.coverage.get("gradients") in {AGREES, DECLARED} and whole.record.ranks:
        report.add(_moved(record, whole, own_pace) if whole.apart is None else ())
        report.add(_followed(record, whole, own_pace, report))
        report.add(_written(record, whole, own_pace) if whole.apart is None else ())
    carried = [one.step for one in report.errors if CARRIED in one.cause and one.step is not None]
    if carried and whole.apart is None:
        report.add(_moved(record, whole, own_pace, until=record.ranks[0].steps[carried[0]]["window"]))


def _moved(record: Record, whole: Run, own_pace: Callable[[], Record], until: float = math.inf) -> Iterator[Finding]:
    """The first buffer that a step leaves otherwise; before the window `until`, which it has made wrong, also parts.

    One process at its own pace is asked, too: with the samples of the ranks it may have been given other draws.
    """
    first = record.ranks[0]
    has_local_norms = any(start.get("local_norms") for start in first.of("start"))
    broadcasts = any(wrap.get("broadcasts") for wrap in first.of("wrap"))
    left_out = () if broadcasts and not has_local_norms else STATISTICS
    for event in [one for one in whole.rank.of("moved") if one["window"] <= until]:
        after, before = _buffers(record, event["window"]), _buffers(record, event["window"] - 1)
        if not after or not _are_equal(before) or event["kept"] is None:
            continue
        theirs = whole.record.value(0, event["kept"])["buffers"]
        are_apart = not _are_equal(after)
        for name, buffer in after[0].items():
            if not name.endswith(left_out) and name in theirs and _differ(buffer, theirs[name]):
                ends = [one[name] for one in after if name in one]
                is_known = until < math.inf or broadcasts  # and then what the others keep is lost
                if not is_known and are_apart and _are_parts(before[0][name], ends, theirs[name]):
                    continue
                again = _buffers(own_pace(), event["window"])
                if not again or name not in again[0] or _differ(buffer, again[0][name]):
                    yield _finding(record, event["window"] - 1, name)
                    return


def _followed(record: Record, whole: Run, own_pace: Callable[[], Record], report: Report) -> Iterator[Finding]:
    """Of each such model, what one step has made of it from the ranks' values: it follows all that they have made.

    One process may be at another place of a schedule, and take other shares: what a step adds is then a multiple; not
    where its steps, at its own pace, have as many samples as those of all ranks. Of parameters that the script's own
    code steps beside an optimizer it may be a rate that is scaled with the ranks.
    """
    for event in whole.rank.of("moved"):
        after = record.state(event["window"])
        if event["kept"] is None or after is None:
            continue
        alone = whole.record.value(0, event["kept"])
        added: list[tuple[str, Tensor, Tensor]] = []
        for name, ours in after["untrained"].items():
            start, right = alone["before"].get(name), alone["teachers"].get(name)
            is_value = ours.is_floating_point() and not name.endswith(STATISTICS)
            if is_value and start is not None and right is not None and ours.shape == right.shape == start.shape:
                added.append((name, _added(start, ours), _added(start, right)))
        if not added:
            continue
        all_ours, all_right = torch.cat([one[1] for one in added]), torch.cat([one[2] for one in added])
        stepped = [one for one in added if one[0].startswith(TRAINED)]
        if stepped and float((all_ours - all_right).norm()) > _OF_A_STEP * float(all_right.norm()):
            name = stepped[0][0].rpartition(": ")[2]
            share = numerics.fit(all_ours, [all_right]).factors[0]
            if share and rates.are_as_many(record, own_pace()):
                yield _stepped_otherwise(record, event["window"] - 1, name, share)
                return
            report.cover("updates", unchecked(_BY_OWN_CODE.format(name)))
        if all_ours.numel() < _FEWEST:
            continue
        fitted = numerics.fit(all_ours, [all_right])
        if fitted.left <= _OF_A_STEP:
            share = fitted.factors[0]
            if not stepped and abs(share - 1) > _OTHER_SHARE and share and rates.are_as_many(record, own_pace()):
                yield _slower(record, event["window"] - 1, added[0][0], share)
                return
        else:
            name, mine, other = max(added, key=lambda one: float((one[1] - one[2]).norm()))
            is_at_rest = not (all_ours.any() and all_right.any())  # it may be renewed after so many samples
            if is_at_rest and not rates.are_as_many(record, own_pace()):
                continue
            if float((mine - other).norm()) > _OF_A_STEP * float(other.norm()):
                yield _behind(record, event["window"] - 1, name)
                return


def _written(record: Record, whole: Run, own_pace: Callable[[], Record]) -> Iterator[Finding]:
    """The first parameter into which the script writes behind a step, with other values than one process does.

    It may clamp weights, or initialise unused codes of a codebook again. Nothing is compared where the script draws
    random numbers at that point, or averages parameters after a step.
    """
    kept = [event for event in whole.rank.of("moved") if event["kept"] is not None]
    values = [(event["window"], whole.record.value(0, event["kept"]).get("written")) for event in kept]
    found = [(window, written) for window, written in values if written]
    is_averaged = record.is_averaged_within or states.averaged_behind(record) is not None if found else False
    if not found or is_averaged or states.local_steps(record) is not None:
        return
    for window, written in found:
        state = record.state(window)
        steps = [step for step in record.ranks[0].in_steps(window - 1) if record.updated(step) is not None]
        drawn = {place_of_draw(one)[0] for one in record.ranks[0].of("draw") if not one["within"]}
        if state is None or drawn & {window - 1, window}:
            continue
        for step in steps:
            ours, left = state["parameters"].get(step["optimizer"], {}), record.update(step)["parameters"]
            for name, theirs in written.get(step["optimizer"], {}).items():
                if name in ours and name in left and _is_written_otherwise(left[name], ours[name], theirs):
                    again = own_pace().state(window) if own_pace().ranks else None
                    own = None if again is None else again["parameters"].get(step["optimizer"], {}).get(name)
                    if own is None or _is_written_otherwise(left[name], ours[name], own):
                        yield _rewritten(step, name)
                        return


def _is_written_otherwise(left: Tensor, mine: Tensor, theirs: Tensor) -> bool:
    if not mine.shape == theirs.shape == left.shape:
        return False
    ours, right = _added(left, mine), _added(left, theirs)
    return float((ours - right).norm()) > _OF_A_STEP * max(float(ours.norm()), float(right.norm()))


def _rewritten(step: Event, name: str) -> Finding:
    return Finding(
        code="parameters-diverged",
        step=step["event"],
        tensor=name,
        where=step["where"],
        cause=f"behind step {step['event']} the script writes other values into {name} than in one process, from the "
        "same parameters and samples: what it writes is made of one rank's samples, say",
        fix="compute what is written into parameters over all ranks: all_reduce counts, gather candidates",
    )


def _differ(mine: Tensor, theirs: Tensor) -> bool:
    """Whether two values of a buffer differ; of integers a few may, which rounding has put on another side."""
    if mine.is_floating_point() or mine.is_complex() or mine.shape != theirs.shape or mine.numel() < _SEVERAL:
        return numerics.differ(mine, theirs)
    ours, right = mine.double(), theirs.double()
    return bool((ours - right).norm() > _OF_COUNTS * right.norm().clamp_min(1.0))


def _added(start: Tensor, end: Tensor) -> Tensor:
    """What a step has added, and what is no rounding of the values that it was added to."""
    change = end.detach().double() - start.detach().double()
    least = _ROUNDINGS * torch.finfo(end.dtype).eps * start.detach().double().abs().clamp_min(1e-30)
    return torch.where(change.abs() > least, change, 0.0).flatten()


def _buffers(record: Record, window: int) -> list[dict[str, Any]]:
    """The buffers with which each rank began a window; none where they were not kept."""
    state = record.state(window)
    found = []
    for rank in record.ranks[1:]:
        kept = [
            one["buffers"] for one in rank.of("window") if one["number"] == window and one.get("buffers") is not None
        ]
        if not kept:
            return []
        found.append(record.value(rank.number, kept[-1]))
    return [] if state is None else [state["buffers"], *found]


def _are_equal(ranks: list[dict[str, Any]]) -> bool:
    """Whether ranks have the same buffers; the script alone begins with the first rank's."""
    return bool(ranks) and all(torch.equal(one[name], ranks[0][name]) for one in ranks[1:] for name in one)


def _are_parts(start: Any, ends: list[Any], theirs: Any) -> bool:
    """Whether ranks that keep a buffer each for itself have together what one process has.

    Added up, on average, or as the largest or smallest of all. How they come together is seen where the buffer is used,
    in an evaluation or a checkpoint.
    """
    stacked, right = torch.stack([end.double() for end in ends]), theirs.double()
    total = (stacked - start.double()).sum(0)
    are_added = any(not numerics.differ(part, right - start.double()) for part in (total, total / len(ends)))
    return are_added or any(not numerics.differ(one, right) for one in (stacked.amax(0), stacked.amin(0)))


def _behind(record: Record, window: int, name: str) -> Finding:
    step = next(iter(record.ranks[0].in_window(window, "step")), None)
    event = window if step is None else step["event"]
    return Finding(
        code="parameters-diverged",
        step=event,
        tensor=name,
        where=None if step is None else step["where"],
        cause=f"step {event} leaves other values in {name}, which no optimizer holds, than in one process: it follows "
        "parameters that are not yet, or on this rank never, what all ranks together have made of them",
        fix="update a copy, or an average, of the weights when every rank has all new parameters",
    )


def _slower(record: Record, window: int, name: str, share: float) -> Finding:
    step = next(iter(record.ranks[0].in_window(window, "step")), None)
    event = window if step is None else step["event"]
    return Finding(
        code="parameters-diverged",
        step=event,
        tensor=name,
        factor=round(share, 4),
        where=None if step is None else step["where"],
        cause=f"step {event} moves {name}, which no optimizer holds, {share:.3g} times as far as in one process, whose "
        "steps have as many samples as those of all ranks: an average of the weights that counts the samples of one "
        "rank, say",
        fix="let its decay, or its half-life, count the samples of all ranks",
    )


def _stepped_otherwise(record: Record, window: int, name: str, share: float) -> Finding:
    step = next(iter(record.ranks[0].in_window(window, "step")), None)
    return Finding(
        code="update-differs",
        step=window if step is None else step["event"],
        tensor=name,
        factor=round(share, 4),
        where=None if step is None else step["where"],
        cause=f"the script's own code steps {name}, which no optimizer holds, {share:.3g} times as far as in one "
        "process, whose steps have as many samples as those of all ranks",
        fix="let the rate of this code be that of one process: the batch of all ranks is not larger",
    )


def _finding(record: Record, window: int, name: str) -> Finding:
    first = record.ranks[0]
    step = next((one["event"] for one in first.in_window(window, "step")), window)
    return Finding(
        code="buffers-diverged",
        step=step,
        tensor=name,
        where=next((one["where"] for one in first.in_window(window, "backward")), None),
        cause=f"step {step} leaves other values in the buffer {name} than in one process: each rank updates it from "
        "its own samples, and the ranks go on with rank 0's",
        fix="all_gather, or all_reduce, what it is updated from, before the update",
    )
