"""Whether the ranks do the same things equally often: steps, skips, schedules, rates, evaluations."""

from __future__ import annotations

from collections.abc import Iterator

from samestep.verification.findings import DECLARED, PROVED, Finding, unchecked
from samestep.verification.journal import Event
from samestep.verification.judging import causes
from samestep.verification.judging.record import Rank, Record
from samestep.verification.judging.states import local_steps
from samestep.verification.report import Report

__all__: list[str] = []


def judge(record: Record, report: Report) -> None:
    """Adds what the counts tell."""
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
    uneven = record.uneven
    if uneven is None:
        report.cover("control", PROVED)
        return
    told = f"until step {uneven['event']}, at which a rank has used its inputs up; then Join lets the others go on"
    report.cover("control", DECLARED, told)


def _rates(record: Record) -> Iterator[Finding]:
    for index in range(record.steps):
        events = record.events_of_step(index)
        if events[0]["optimizer"] in record.by_themselves:
            continue
        for rank, event in enumerate(events[1:], 1):
            if causes.rates_differ(events[0], event):
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
    """Where the first step is that one rank takes behind other backward passes than another."""
    for mine, theirs in zip(first.steps, other.steps, strict=False):
        counts = [
            sum(event["kind"] == "backward" for event in rank.by_window.get(step["window"], []))
            for rank, step in ((first, mine), (other, theirs))
        ]
        if counts[0] != counts[1]:
            where: str = mine["where"]
            return where
    return None


def scalers(record: Record) -> Iterator[Finding]:
    """Yields the first call at which the gradient scalers of two ranks decide otherwise."""
    told = [[(event["scale"], event["skipped"]) for event in rank.of("scaler")] for rank in record.ranks]
    for rank, theirs in enumerate(told[1:], 1):
        for place, (first, other) in enumerate(zip(told[0], theirs, strict=False)):
            if first != other:
                event = record.ranks[rank].of("scaler")[place]
                index = event.get("index", place)  # where only the last events are kept
                does = "skips" if other[1] else "does not skip"
                yield Finding(
                    code="steps-differ",
                    rank=record.ranks[rank].number,
                    step=index,
                    where=event["where"],
                    cause=f"at call {index} of scaler.step rank {record.ranks[rank].number} {does} and has the scale "
                    f"{other[0]:g}, rank 0 {'skips' if first[1] else 'does not skip'} and has {first[0]:g}",
                    fix="reduce the gradients before the scaler looks at them, or reduce its found_inf",
                )
                return


def _schedules_of_micro_batches(record: Record) -> Iterator[Finding]:
    """Whether a schedule moves on between the backward passes of one step, or of one that a scaler leaves out."""
    rank = record.ranks[0]
    for step in rank.steps:
        window = rank.by_window.get(step["window"], [])
        told = [event for event in window if event["kind"] in {"backward", "scheduler", "scaler"}]
        kinds = [event["kind"] for event in told[_last_skip(told) :]]
        moved = [event for event in window if event["kind"] == "scheduler"]
        if any(kinds[i : i + 3] == ["backward", "scheduler", "backward"] for i in range(len(kinds))):
            is_over = any(one["moved"] > one["length"] for one in rank.of("scheduler") if one.get("length"))
            yield Finding(
                code="learning-rate-differs",
                severity="error" if is_over else "note",
                step=step["event"],
                where=moved[0]["where"],
                cause=f"the schedule steps after every micro-batch, {kinds.count('backward')} times for one step of "
                f"the optimizer: {'its rates are over too soon' if is_over else 'its length must count micro-batches'}",
                fix="step the schedule where the optimizer steps" if is_over else None,
            )
            return


def _last_skip(told: list[Event]) -> int:
    """Where the window's own step begins: behind the last that a scaler has left out, and what belongs to that."""
    skips = [index for index, event in enumerate(told) if event["kind"] == "scaler" and event["skipped"]]
    behind = skips[-1] + 1 if skips else 0
    return next((index for index in range(behind, len(told)) if told[index]["kind"] == "backward"), len(told))


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
    told = [[event for event in rank.of("clip") if event["window"] == 0] for rank in record.ranks]
    for rank, theirs in enumerate(told[1:], 1):
        for first, other in zip(told[0], theirs, strict=False):
            clips = max(first["norm"], other["norm"]) > first["most"]
            if clips and abs(first["norm"] - other["norm"]) > _SAME_NORM * max(first["norm"], other["norm"]):
                yield Finding(
                    code="gradient-differs",
                    rank=record.ranks[rank].number,
                    step=0,
                    factor=other["norm"] / first["norm"] if first["norm"] else None,
                    where=other["where"],
                    cause=f"rank {record.ranks[rank].number} clips a norm of {other['norm']:.4g}, rank 0 one of "
                    f"{first['norm']:.4g}: each clips {_CUT if record.is_cut else _LOCAL}",
                    fix="clip by the norm of all parts: model.clip_grad_norm_(…) in FullyShardedDataParallel"
                    if record.is_cut
                    else "average the gradients first, then clip",
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
    window = rank.by_window.get(step["window"], [])
    backwards = [event for event in window if event["kind"] == "backward"]
    batches = [event for event in window if event["kind"] == "batch" and event["training"]]
    alike = len({event["where"] for event in backwards}) == 1 and len(batches) == len(backwards)
    alike = alike and len({event["key"] for event in batches}) <= 1  # a loss over two sources is a sum of two means
    means = all(event.get("loss") in _MEANS and event["mean"] for event in backwards)
    return backwards if alike and means and len(rank.of("optimizer")) == 1 else []


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
    factors = {event["factor"] for event in backwards}
    window = rank.by_window[step["window"]]
    before = [event["norm"] for event in window if event["kind"] == "accumulated"]
    clips = [event for event in window if event["kind"] == "clip"]
    if (
        len(factors) > 1
        or not before
        or not before[-1]
        or not step["probe"]
        or any(e["kind"] == "scaled" for e in window)
    ):
        return None
    clipped = 1.0
    for clip in clips:
        clipped *= min(1.0, clip["most"] / (clip["norm"] + 1e-6))
    return float(factors.pop() * len(backwards) * step["probe"] / before[-1] / clipped)


_NEAR = 0.01
_LOCAL = "its own gradient before it is averaged"
_CUT = "its own parts of the gradients by their norm, which is not that of the whole"
_SAME_NORM = 1e-5  # of a norm; averaged gradients have one norm on all ranks
_MEANS = {"MeanBackward0", "NllLossBackward0", "MseLossBackward0", "SmoothL1LossBackward0", "NllLoss2DBackward0"}


def _data_parallel(record: Record) -> Iterator[Finding]:
    for rank in record.ranks:
        for event in rank.of("wrap"):
            if event["wrapper"] == "DataParallel":
                yield Finding(
                    code="data-parallel-module",
                    rank=rank.number,
                    where=event["where"],
                    cause="nn.DataParallel splits each batch over the devices of one process, with statistics and "
                    "losses per device; on several processes it averages nothing between them",
                    fix="model = samestep.replicate(model, world), or DistributedDataParallel(model)",
                )
                return
