"""Whether the ranks step, skip, move schedules on and clip equally often, and at the same rates."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from samestep.verification.findings import DECLARED, PROVED, Finding, unchecked
from samestep.verification.journal import Event
from samestep.verification.judging import causes
from samestep.verification.judging.record import Rank, Record, beside_first
from samestep.verification.judging.states import local_steps
from samestep.verification.report import Report

_NEAR = 0.01
_SAME_NORM = 1e-5  # of a norm; averaged gradients have one norm on all ranks
_MEANS = {"MeanBackward0", "NllLossBackward0", "MseLossBackward0", "SmoothL1LossBackward0", "NllLoss2DBackward0"}


def judge(record: Record, report: Report) -> None:
    if not any(rank.steps for rank in record.ranks):
        report.cover("control", unchecked("no optimizer step was seen"))
        return
    report.add(_rates(record))
    report.add(_steps(record))
    report.add(scalers(record))
    report.add(_schedules_of_micro_batches(record))
    report.add(_clipped_scaled(record))
    report.suspect(_clipped_apart(record))
    report.add(_accumulated(record))
    report.add(_data_parallel(record))
    if record.uneven is None:
        report.cover("control", PROVED)
        return
    until = f"until step {record.uneven['event']}, at which a rank has used its inputs up"
    report.cover("control", DECLARED, f"{until}; then Join lets the others go on")


def _rates(record: Record) -> Iterator[Finding]:
    for index in range(record.steps):
        events = record.events_of_step(index)
        if events[0]["optimizer"] in record.by_themselves:
            continue
        for rank, event in enumerate(events[1:], 1):
            if record.is_alike and causes.rates_differ(events[0], event):
                yield causes.rates(record, index, rank)
                return
            mine, theirs = record.ranks[0].rates_by_name(events[0]), record.ranks[rank].rates_by_name(event)
            if not record.is_alike and any(mine[name] != theirs[name] for name in mine.keys() & theirs.keys()):
                yield causes.rates(record, index, rank)
                return


def _steps(record: Record) -> Iterator[Finding]:
    if not all(rank.is_complete for rank in record.ranks) or record.uneven is not None:
        return
    counts = [len(rank.steps) for rank in record.ranks]
    if len(set(counts)) > 1:
        rank = next(i for i, count in enumerate(counts) if count != counts[0])
        where = _first_apart(record.ranks[0], record.ranks[rank])
        yield unequal_steps(record.ranks[rank].number, (counts[rank], counts[0]), where)


def unequal_steps(rank: int, counts: tuple[int, int], where: str | None, what: str = "optimizer steps") -> Finding:
    """Returns the finding for a rank that takes other numbers of steps than rank 0: `counts` of both."""
    return Finding(
        code="steps-differ",
        rank=rank,
        step=min(counts),
        where=where,
        cause=f"rank {rank} took {counts[0]} {what}, rank 0 {counts[1]}",
        fix="let all ranks decide together: reduce what the decision depends on",
    )


def _first_apart(first: Rank, other: Rank) -> str | None:
    """The line of the first step before which two ranks have made different numbers of backward passes."""
    for mine, theirs in zip(first.steps, other.steps, strict=False):
        counts = {len(rank.in_window(step["window"], "backward")) for rank, step in ((first, mine), (other, theirs))}
        if len(counts) > 1:
            where: str = mine["where"]
            return where
    return None


def scalers(record: Record) -> Iterator[Finding]:
    """Yields the first call at which the gradient scalers of two ranks decide otherwise."""
    calls = [[(event["scale"], event["skipped"]) for event in rank.of("scaler")] for rank in record.ranks]
    for rank, place, first, other in beside_first([dict(enumerate(theirs)) for theirs in calls]):
        if first != other:
            number, event = record.ranks[rank].number, record.ranks[rank].of("scaler")[place]
            index = event.get("index", place)  # where only the last events are kept
            mine, theirs = (f"{'skips' if skips else 'does not skip'} and has" for _, skips in (first, other))
            yield Finding(
                code="steps-differ",
                rank=number,
                step=index,
                where=event["where"],
                cause=f"at call {index} of scaler.step rank {number} {theirs} the scale {other[0]:g}, rank 0 {mine} "
                f"{first[0]:g}",
                fix="reduce the gradients before the scaler looks at them, or reduce its found_inf",
            )
            return


def _schedules_of_micro_batches(record: Record) -> Iterator[Finding]:
    """Whether a schedule moves on between the backward passes of one step, or of one that a scaler leaves out."""
    rank = record.ranks[0]
    for step in rank.steps:
        events = rank.in_window(step["window"], "backward", "scheduler", "scaler")
        kinds = [event["kind"] for event in events[_own_begin(events) :]]
        if any(kinds[i : i + 3] == ["backward", "scheduler", "backward"] for i in range(len(kinds))):
            is_over = any(one["moved"] > one["length"] for one in rank.of("scheduler") if one.get("length"))
            yield Finding(
                code="learning-rate-differs",
                severity="error" if is_over else "note",
                step=step["event"],
                where=rank.in_window(step["window"], "scheduler")[0]["where"],
                cause=f"the schedule steps after every micro-batch, {kinds.count('backward')} times for one step of "
                f"the optimizer: {'its rates are over too soon' if is_over else 'its length must count micro-batches'}",
                fix="step the schedule where the optimizer steps" if is_over else None,
            )
            return


def _own_begin(events: list[Event]) -> int:
    """Where the window's own step begins: after the last that a scaler has left out, and what belongs to that."""
    skips = [index for index, event in enumerate(events) if event["kind"] == "scaler" and event["skipped"]]
    after = skips[-1] + 1 if skips else 0
    return next((index for index in range(after, len(events)) if events[index]["kind"] == "backward"), len(events))


def _clipped_scaled(record: Record) -> Iterator[Finding]:
    for event in record.ranks[0].of("clipped_scaled"):
        if event["scale"] != 1.0 and not _is_round((event.get("most") or 0.0) / event["scale"]):
            yield Finding(
                code="gradient-scale",
                step=event["window"],
                factor=event["scale"],
                where=event["where"],
                cause=f"gradients are clipped while the scaler still has them multiplied by {event['scale']:g}, so the "
                "threshold means a norm that is smaller by as much",
                fix="scaler.unscale_(optimizer)    # before clip_grad_norm_",
            )
            return


def _is_round(number: float) -> bool:
    """Whether somebody may have written a number down: a threshold that is multiplied by the scale is such a one."""
    return number > 0 and float(f"{number:.3g}") == number


def _clipped_apart(record: Record) -> Iterator[Finding]:
    """Whether ranks clip by norms of their own: then each is scaled otherwise, before they are averaged."""
    if local_steps(record) is not None:
        return  # each steps with a gradient of its own
    clips = [dict(enumerate(rank.in_window(0, "clip"))) for rank in record.ranks]
    for rank, _, first, other in beside_first(clips):
        norms, number = (first["norm"], other["norm"]), record.ranks[rank].number
        if max(norms) > first["most"] and max(norms) - min(norms) > _SAME_NORM * max(norms):
            what = "its own gradient before it is averaged"
            fix = "average the gradients first, then clip"
            if record.is_cut:
                what = "its own parts of the gradients by their norm, which is not that of the whole"
                fix = "clip by the norm of all parts: model.clip_grad_norm_(…) in FullyShardedDataParallel"
            yield Finding(
                code="gradient-differs",
                rank=number,
                step=0,
                factor=other["norm"] / first["norm"] if first["norm"] else None,
                where=other["where"],
                cause=f"rank {number} clips a norm of {other['norm']:.4g}, rank 0 one of {first['norm']:.4g}: each "
                f"clips {what}",
                fix=fix,
            )
            return


def _accumulated(record: Record) -> Iterator[Finding]:
    """The gradients of k micro-batches, each of its own mean, make the mean of all if each is divided by k."""
    rank = record.ranks[0]
    counts: list[int] = []
    for step in rank.steps:
        backwards = _micro_batches(rank, step)
        factor = _effective(rank, step, backwards) if backwards else None
        if factor is None:
            continue
        count, usual = len(backwards), max(counts, default=0)
        counts.append(count)
        if count > 1 and any(abs(factor / wrong - 1) < _NEAR for wrong in (count, 1 / count)):
            does = "each with the gradient of its own mean" if factor > 1 else "and divided too often, or by too much"
            yield _summed(step, backwards, factor, f"{does}: together")
            return
        if count < usual and abs(factor * usual / count - 1) < _NEAR:
            yield _summed(step, backwards, factor, f"divided by {usual} as in other steps: together")
            return


def _micro_batches(rank: Rank, step: Event) -> list[Event]:
    """The backward passes of a step, where each is of one batch and its mean; else none."""
    backwards = rank.added_in(step["window"])
    thrown_away = len(rank.in_window(step["window"], "backward")) - len(backwards)
    batches = [event for event in rank.in_window(step["window"], "batch") if event["training"]][thrown_away:]
    equal = len({event["where"] for event in backwards}) == 1 and len(batches) == len(backwards)
    equal = equal and len({event["key"] for event in batches}) <= 1  # a loss over two sources is a sum of two means
    means = all(event.get("loss") in _MEANS and event["mean"] for event in backwards)
    return backwards if equal and means and len(rank.of("optimizer")) == 1 else []


def _summed(step: Event, backwards: list[Event], factor: float, how: str) -> Finding:
    count = len(backwards)
    return Finding(
        code="gradient-scale",
        step=step["event"],
        factor=round(factor, 4),
        where=backwards[0]["where"],
        cause=f"{'1 micro-batch is' if count == 1 else f'{count} micro-batches are'} added up in this step, {how} "
        f"{factor:.4g} times the gradient of the mean of all",
        fix=f"divide by the number of micro-batches in the step, here {count}, and only once",
    )


def _effective(rank: Rank, step: Event, backwards: list[Event]) -> float | None:
    """How often the step counts the mean gradient of its micro-batches: 1 where it is right, None where unknown.

    What multiplies each loss is in autograd's graph; what multiplies the gradients between the last backward pass and
    the step shows in their norm, but for what clipping and a scaler are known to do.
    """
    factors, window = {event["factor"] for event in backwards}, step["window"]
    before = [event["norm"] for event in rank.in_window(window, "accumulated")]
    if len(factors) > 1 or not before or not before[-1] or not step["probe"] or rank.in_window(window, "scaled"):
        return None
    clipped = prod(min(1.0, clip["most"] / (clip["norm"] + 1e-6)) for clip in rank.in_window(window, "clip"))
    return float(factors.pop() * len(backwards) * step["probe"] / before[-1] / clipped)


def _data_parallel(record: Record) -> Iterator[Finding]:
    wraps = [(rank.number, event) for rank in record.ranks for event in rank.of("wrap")]
    for rank, event in wraps:
        if event["wrapper"] == "DataParallel" and event["trained"]:
            yield Finding(
                code="data-parallel-module",
                rank=rank,
                where=event["where"],
                cause="nn.DataParallel splits each batch over the devices of one process, with statistics and losses "
                "per device; on several processes it averages nothing between them",
                fix="model = samestep.replicate(model, world), or DistributedDataParallel(model)",
            )
            return
