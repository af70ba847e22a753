"""Whether the ranks' gradient is that of all their samples, by what each rank computes for itself.

    own gradients g₀ … g_N of the ranks          g = Σ wᵣ·gᵣ, as measured
    losses: means over c₀ … c_N values           the mean over all values has the weights cᵣ / Σ c

So it is judged where one process cannot be given the ranks' samples: a script cuts them, or draws them, by itself. It
is no proof where a loss is anything but a mean over its rank's values, or depends on what ranks bring together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from samestep.text import plural
from samestep.verification import numerics
from samestep.verification.findings import AGREES, DECLARED, Finding, unchecked
from samestep.verification.journal import Event
from samestep.verification.judging import means, own_pace
from samestep.verification.judging.record import Rank, Record
from samestep.verification.judging.samples import left_out, passed_over
from samestep.verification.report import Report

__all__: list[str] = []

EVERY_ZERO = "every gradient is zero, on the ranks and in one process"
REMARK = (
    "the samples come from no DataLoader, and one process takes others: the ranks' gradients were compared with the "
    "mean of what each computes by itself"
)
_NEAR = 1e-3  # of a weight
_CUT = 0.75  # of the samples of one process, at most, that a rank has where the data are cut
_MOST_AGAIN = 0.4  # of the samples of a step that were in the step before; of two ranks half of them
_BY_CHANCE = 0.02  # of the samples that may be alike without being one
_FEWEST = 8  # numbers in a gradient that is no multiple of others by chance
_BRINGING = {"all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "reduce_scatter", "all_to_all"}
_NO_LOADER = "no DataLoader tells which samples were trained on"
_OTHERS = "one process takes other samples"
_UNKNOWN = "what each rank computes by itself is not known"
_CHANGED = "the ranks' gradients are not a weighted sum of what each computes by itself"
_BROUGHT = "the loss depends on what the ranks bring together at {}"
_NO_MEANS = "no rank's loss is a plain mean over its samples: whether the average is that of all is open"


def judge(record: Record, steps: list[Event], report: Report) -> None:
    """Adds what the gradients of these steps, whose values were kept, are beside those of each rank."""

    def leave_open(why: str) -> None:
        report.cover("gradients", unchecked(f"{_OTHERS}, and {why}"))

    worst, seen = 0.0, 0
    for step in steps:
        own = record.own(step)
        if own is None:
            leave_open(_UNKNOWN)
            return
        used = record.gradients(step)
        ours, parts = numerics.flat(used, *own), [numerics.flat(one, used, *own) for one in own]
        if not ours.any() and not any(part.any() for part in parts):
            continue
        if not numerics.are_finite(used):
            leave_open(f"from step {step['event']} on gradients are not finite")
            return
        found = numerics.fit(ours, parts)
        if not found.left <= numerics.limit(0.0, used):
            report.add(_of_one_tensor(record, step, used, own))
            leave_open(_CHANGED)
            return
        if (where := brings_together(record.ranks[0], steps[0])) is not None:
            leave_open(_BROUGHT.format(where))
            return
        weights = means.weights(record, step)
        if weights is None or not _judge(record, step, ours, parts, weights, report):
            leave_open(_NO_MEANS)
            return
        if report.errors:
            return
        worst, seen = max(worst, found.left), seen + 1
    if not seen:
        report.cover("gradients", unchecked(EVERY_ZERO))
        return
    report.remarks.append(REMARK)
    report.cover("gradients", DECLARED, f"worst error {worst:.1e}, {plural(seen, 'step')}")


def _judge(
    record: Record, step: Event, ours: Tensor, parts: list[Tensor], weights: means.Weights, report: Report
) -> bool:
    """Judges a gradient beside the mean of the ranks' own, with these weights; returns whether that tells anything."""
    right = sum(share * part for share, part in zip(weights.shares, parts, strict=True))
    found = numerics.fit(ours, [torch.as_tensor(right)])
    if not found.left <= numerics.limit(0.0, record.gradients(step)):  # weights of nearly parallel parts tell little
        if weights.is_plain:
            report.add([mean_of_means(record, step, weights.shares, numerics.fit(ours, parts).factors)])
        return weights.is_plain
    clipped = clipping(record, step)
    total, size = found.factors[0] / (clipped or 1.0), record.size
    if clipped is None and total < 1:
        return True  # by an unknown norm
    if _is_near(total * weights.factor, 1.0):
        return True
    if _is_near(total, 1.0):  # a factor that is part of the loss, unless it is one for the number of ranks
        return not any(_is_near(weights.factor, other) for other in (1 / size, float(size)))
    if weights.is_plain:
        report.add([scaled(record, step, total)])
    return weights.is_plain  # else the script may divide by something that one process knows too


def judge_samples(record: Record, whole: Record, alone: Callable[[], Record], report: Report) -> None:
    """Adds whether the ranks' models have got the samples that those of one process get.

    Args:
        record: of the ranks.
        whole: of the script alone, which takes as many steps.
        alone: records it for as many samples as the ranks have used.
        report: to add to.
    """
    if (where := _drawn_at(record, whole)) is not None:
        report.cover("data", DECLARED, f"each rank draws them at {where}, other ones than the other ranks")
        return
    mine, theirs = rows_of(record), rows_of(alone())
    if (count := _overlap(record, alone())) > _BY_CHANCE * len(mine):
        report.add([_parts_that_overlap(record, count)])
    elif (share := _soon_again(record.data.ranks)) >= _MOST_AGAIN and _soon_again(alone().ranks[:1]) <= _BY_CHANCE:
        report.add([_comes_again(record, share)])
    elif count := passed_over([_in_turn(rank) for rank in record.data.ranks], _in_turn(*alone().ranks[:1])):
        first = record.ranks[0]
        report.add([left_out(count, first.backward_of(first.steps[0]))])
    elif not mine or not theirs:
        report.cover("data", unchecked(f"{_NO_LOADER}, and the inputs of the models have no rows to compare"))
    elif mine == theirs:
        report.cover("data", AGREES, f"the {len(mine)} samples that one process uses, by what the models get")
    elif own_pace.worst_error(record, alone(), record.kept_steps) is not None:
        report.cover("data", AGREES, "one process that goes its own way has the same gradients")
    else:
        report.cover(
            "data",
            unchecked(
                f"{_NO_LOADER}; the ranks' models get {plural(len(mine), 'different sample')}, those of one process "
                f"{len(theirs)}, and {len(mine & theirs)} of them are the same"
            ),
        )


def _drawn_at(record: Record, whole: Record) -> str | None:
    """The line at which each rank draws its samples, or their places, as one process does, and none as another rank."""
    told = [{one["place"]: one for one in rank.of("draw") if not one["within"]} for rank in record.data.ranks]
    alone = {one["place"]: one["shape"] for rank in whole.ranks[:1] for one in rank.of("own_draw")}
    for place, first in told[0].items() if told else ():
        others = [drawn.get(place) for drawn in told[1:]]
        same = all(one is not None and one["shape"] == first["shape"] for one in others)
        apart = {one["digest"] for one in [first, *others] if one is not None}
        if same and alone.get(place) == first["shape"] and None not in apart and len(apart) == len(told):
            where: str = place.partition("|")[2].rpartition("|")[0]
            return where
    return None


def _overlap(record: Record, alone: Record) -> int:
    """How many samples several ranks use before any of them begins again, where each goes over a part of the data.

    A rank that draws from all data meets a sample again after as many others as one process does, not after an Nth.
    """
    parts = [_until_repeated(rank) for rank in record.data.ranks]
    whole = _until_repeated(alone.ranks[0]) if alone.ranks else set()
    are_cut = all(part and len(part) <= _CUT * len(whole) for part in parts)
    return sum(map(len, parts)) - len(set().union(*parts)) if are_cut else 0


def left_out_of_one_batch(record: Record, alone: Record) -> Finding | None:
    """Returns what is to be said where one process has one batch at every step, and the ranks leave some of it out.

    Fewer than there are ranks may be what is left of a batch that is cut in equal parts.
    """
    mine, theirs = _by_step(record.data.ranks), _by_step(alone.ranks[:1])
    windows = [window for window in mine if window in theirs]
    if len(windows) < 2 or any(told[one] != told[windows[0]] for told in (mine, theirs) for one in windows):
        return None
    ours, whole = mine[windows[0]], theirs[windows[0]]
    if not ours < whole or len(whole - ours) < record.size:
        return None
    first = record.ranks[0]
    return Finding(
        code="samples-missing",
        where=first.backward_of(first.steps[0]),
        cause=f"one process trains on {plural(len(whole), 'sample')} at every step, and the ranks together on "
        f"{len(ours)} of them: {len(whole - ours)} are in no rank's part",
        fix="make the samples first and divide them after that: a part of a text has fewer windows than its share",
    )


def _soon_again(ranks: Sequence[Rank]) -> float:
    """What share of the samples of a step were in the step before, on any of these ranks; of all steps the mean."""
    steps = list(_by_step(ranks).values())
    shares = [len(one & before) / len(one) for before, one in pairwise(steps)]
    return sum(shares) / len(shares) if shares else 0.0


def _by_step(ranks: Sequence[Rank]) -> dict[int, set[str]]:
    """Window -> the rows that the models of these ranks get in it."""
    found: dict[int, set[str]] = {}
    for rank in ranks:
        for event in rank.of("input"):
            if event["rows"]:
                found.setdefault(event["window"], set()).update(event["rows"])
    return dict(sorted(found.items()))


def _comes_again(record: Record, share: float) -> Finding:
    first = record.ranks[0]
    return Finding(
        code="samples-repeated",
        where=first.backward_of(first.steps[0]),
        cause=f"{share:.0%} of the samples of a step were in the step before, on another rank, and in one process none "
        "is: what reads them goes on by the samples of one rank",
        fix="go on by the samples of all ranks after each step: position += batch_size * world_size",
    )


def _in_turn(*ranks: Rank) -> list[str]:
    """The rows that a rank's models get, in order."""
    calls = [(event["window"], tuple(event["rows"])) for rank in ranks for event in rank.of("input") if event["rows"]]
    return [row for _, rows in dict.fromkeys(calls) for row in rows]


def _until_repeated(rank: Rank) -> set[str]:
    """The rows that a rank's models get before one comes again; none where that is not seen, or at once."""
    seen: set[str] = set()
    calls = dict.fromkeys((event["window"], tuple(event["rows"])) for event in rank.of("input") if event["rows"])
    for _, call in calls:
        if seen & set(call):
            return seen
        seen |= set(call)
    return set()


def _parts_that_overlap(record: Record, count: int) -> Finding:
    first = record.ranks[0]
    return Finding(
        code="samples-repeated",
        where=first.backward_of(first.steps[0]),
        cause=f"each rank goes over a part of the data, and {plural(count, 'sample')} are in several ranks' parts "
        "before any rank begins again: the parts are cut out of orders that differ",
        fix="draw the order from a generator that all ranks seed alike, with the epoch, and that nothing else uses",
    )


def rows_of(record: Record) -> set[str]:
    """Returns digests of all rows that models got with gradients."""
    return {row for rank in record.ranks for event in rank.of("input") for row in event["rows"]}


def _is_near(number: float, right: float) -> bool:
    return abs(number - right) <= _NEAR * abs(right)


def _of_one_tensor(
    record: Record, step: Event, used: numerics.Gradients, own: list[numerics.Gradients]
) -> Iterator[Finding]:
    """The gradients that are N times, or an Nth of, what those of most tensors are beside the ranks' own."""
    totals: dict[str, float] = {}
    for name, gradient in used.items():
        parts = [one.get(name) for one in own]
        if gradient is None or gradient.numel() < _FEWEST or any(part is None for part in parts):
            continue
        found = numerics.fit(numerics.vector(gradient), [numerics.vector(part) for part in parts if part is not None])
        if not found.left <= numerics.limit(0.0, used):
            return  # the script changes it otherwise, too
        totals[name] = sum(found.factors)
    usual = sorted(totals.values())[len(totals) // 2] if totals else 0.0
    for name, total in totals.items() if usual else ():
        times = total / usual
        if any(_is_near(times, other) for other in (float(record.size), 1 / record.size)):
            yield Finding(
                code="gradient-scale",
                step=step["event"],
                tensor=name,
                factor=round(times, 6),
                where=record.ranks[0].backward_of(step),
                cause=f"at step {step['event']} the gradient of {name} is {times:.4g} times, beside the others, what "
                "the ranks' backward passes bring: it is added up, or divided, once more",
                fix="reduce each parameter once: tied weights are one parameter of several modules",
            )
            return


def scaled(record: Record, step: Event, total: float) -> Finding:
    """Returns the finding for gradients that are a multiple of the mean of the ranks'."""
    return Finding(
        code="gradient-scale",
        step=step["event"],
        factor=round(total, 6),
        where=record.ranks[0].backward_of(step),
        cause=f"at step {step['event']} the gradient is {total:.4g} times that of the mean over the samples of all "
        f"{record.size} ranks",
        fix="divide the sum of all ranks by their number, once",
    )


def mean_of_means(record: Record, step: Event, right: Sequence[float], shares: Sequence[float]) -> Finding:
    """Returns the finding for ranks that count otherwise in an average than by the number of their values."""
    told = [", ".join(f"{one:.3f}" for one in each) for each in (right, shares)]
    return Finding(
        code="gradient-differs",
        step=step["event"],
        where=record.ranks[0].backward_of(step),
        cause=f"at step {step['event']} each rank's loss is a mean over its own number of values, and the ranks count "
        f"{told[1]}: the mean over all values weighs them {told[0]}",
        fix="divide each rank's sum by the number of items of all ranks, times the world size; samestep does it in "
        "batches.mean(losses)",
    )


def clipping(record: Record, event: Event) -> float | None:
    """Returns by what the ranks' gradient was multiplied when its norm was clipped; None where that is not known."""
    window = record.ranks[0].by_window.get(event["window"], [])
    told = [min(1.0, one["most"] / (one["norm"] + 1e-6)) for one in window if one["kind"] == "clip"]
    calls = sum(one["kind"] == "clipping" for one in window)  # the norm of cut gradients is not recorded
    return 1.0 if not calls and not told else told[0] if len(told) == 1 == max(calls, 1) else None


def brings_together(rank: Rank, step: Event) -> str | None:
    """Returns the line at which something of all ranks is brought together before the last backward pass of a step.

    Asked of a first step: in later ones an evaluation may lie before it.
    """
    window = rank.by_window.get(step["window"], [])
    backwards = [place for place, one in enumerate(window) if one["kind"] == "backward"]
    before = window[: backwards[-1]] if backwards else []
    return next((one["where"] for one in before if one["kind"] == "collective" and one["op"] in _BRINGING), None)


def calls_in(rank: Rank, window: int) -> list[tuple[str, ...]]:
    """Returns digests of the rows that a rank's models got in a window, for each call; a wrapper tells it again."""
    events = [event for event in rank.by_window.get(window, []) if event["kind"] == "input" and event["rows"]]
    return list(dict.fromkeys(tuple(event["rows"]) for event in events))
