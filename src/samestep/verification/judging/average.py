"""Compares the ranks' gradient with a weighted sum of gradients that are known of each rank.

    g = Σ wᵣ·gᵣ as measured       a mean over the c₀ … c_N values of the ranks' losses has the weights cᵣ / Σ c

It decides where one process cannot be given the samples of all ranks, and where losses are means over their values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from samestep.text import plural
from samestep.verification import numerics
from samestep.verification.findings import DECLARED, Finding, unchecked
from samestep.verification.journal import Event
from samestep.verification.judging.rates import samples_of_steps
from samestep.verification.judging.record import Rank, Record, Run
from samestep.verification.report import Report

EVERY_ZERO = "every gradient is zero, on the ranks and in one process"
REMARK = (
    "the samples come from no DataLoader, and one process takes others: the ranks' gradients were compared with the "
    "mean of what each computes by itself"
)
IN_TURN_REMARK = (
    "the samples come from no DataLoader, and one process has as many in a step as one rank: gradients were compared "
    "with the weighted sum of those of one process in so many steps as there are ranks"
)
_BY_RANK_REMARK = (
    "the ranks' gradients were compared with a weighted mean of what one process makes of each rank's samples"
)
_NEAR = 1e-3  # of a weight
_FEWEST = 8  # numbers in a gradient that is no multiple of others by chance
_BRINGING = {"all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "reduce_scatter", "all_to_all"}
_NO_MEANS = "no rank's loss is a plain mean over its samples: whether the average is that of all is open"


def vectors(used: numerics.Gradients, parts: Sequence[Any]) -> tuple[Tensor, list[Tensor]] | None:
    """Returns gradients and the parts that may add up to them, shape [numbers] each; None where all are zero."""
    ours, theirs = numerics.flat(used, *parts), [numerics.flat(part, used, *parts) for part in parts]
    return (ours, theirs) if ours.any() or any(part.any() for part in theirs) else None


def _cover(errors: Sequence[float], report: Report) -> None:
    report.cover("gradients", DECLARED, f"worst error {max(errors):.1e}, {plural(len(errors), 'step')}")


# --- the ranks' own gradients -----------------------------------------------------------------------


def judge(record: Record, steps: list[Event], report: Report, alone: Callable[[], Record] | None = None) -> None:
    """Compares the gradients of these steps, whose values were kept, with those of each rank's own backward passes.

    `alone` records one process at its own pace, which may change some of its own gradients, too.
    """
    errors: list[float] = []
    for step in steps:
        error = _judge_step(record, step, brings_together(record.ranks[0], steps), report, alone)
        if isinstance(error, str):
            report.cover("gradients", unchecked(f"one process takes other samples, and {error}"))
            return
        if error is not None:
            if report.errors:
                return
            errors.append(error)
    if not errors:
        report.cover("gradients", unchecked(EVERY_ZERO))
        return
    report.remarks.append(REMARK)
    _cover(errors, report)


def _judge_step(
    record: Record, step: Event, brought_at: str | None, report: Report, alone: Callable[[], Record] | None
) -> float | str | None:
    """Returns the error of a step, None where all is zero, or why it cannot be judged."""
    own = record.own(step)
    if own is None:
        return "what each rank computes by itself is not known"
    used = record.gradients(step)
    if (known := vectors(used, own)) is None:
        return None
    if not numerics.are_finite(used):
        return f"from step {step['event']} on gradients are not finite"
    ours, parts = known
    left = numerics.fit(ours, parts).left
    if not left <= numerics.limit(0.0, used):
        report.add(_of_one_tensor(record, step, alone))
        return "the ranks' gradients are not a weighted sum of what each computes by itself"
    if brought_at is not None:
        return f"the loss depends on what the ranks bring together at {brought_at}"
    mean = weights(record, step)
    if mean is None or not _judge_weights(record, step, ours, parts, mean, report):
        return _NO_MEANS
    return left


def _judge_weights(
    record: Record, step: Event, ours: Tensor, parts: list[Tensor], mean: Weights, report: Report
) -> bool:
    """Compares a gradient with the mean of the ranks' own by these weights; returns whether that is conclusive."""
    right = sum(share * part for share, part in zip(mean.shares, parts, strict=True))
    found = numerics.fit(ours, [torch.as_tensor(right)])
    if not found.left <= numerics.limit(0.0, record.gradients(step)):  # weights of nearly parallel parts tell little
        if mean.is_plain:
            report.add([mean_of_means(record, step, mean.shares, numerics.fit(ours, parts).factors)])
        return mean.is_plain
    clipped = clipping(record, step)
    total, size = found.factors[0] / (clipped or 1.0), record.size
    if _is_clipped(total, clipped, record, step):
        return True
    if _is_near(total * mean.factor, 1.0):
        return True
    if _is_near(total, 1.0):  # a factor that is part of the loss, unless it is one for the number of ranks
        return not any(_is_near(mean.factor, other) for other in (1 / size, float(size)))
    if mean.is_plain:
        report.add([scaled(record, step, total)])
    return mean.is_plain  # else the script may divide by something that one process knows too


def _of_one_tensor(record: Record, step: Event, alone: Callable[[], Record] | None) -> Iterator[Finding]:
    """The gradients that are N times, or an Nth of, what most are of the ranks' own, and not so in one process."""
    for name, times in _beside_others(record, step).items():
        if any(_is_near(times, other) for other in (float(record.size), 1 / record.size)):
            own = {} if alone is None or not alone().ranks else _beside_others(alone(), step)
            if name in own and _is_near(own[name], times):
                continue
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


def _beside_others(record: Record, step: Event) -> dict[str, float]:
    """Name -> what a gradient is of the ranks' own, beside the others; nothing if the script changes it otherwise."""
    own = record.own(step) if step["event"] < record.steps else None
    used = record.gradients(step) if own else {}
    totals: dict[str, float] = {}
    for name, gradient in used.items():
        parts = [part for one in own or () if (part := one.get(name)) is not None]
        if gradient is None or gradient.numel() < _FEWEST or len(parts) < record.size:
            continue
        found = numerics.fit(numerics.vector(gradient), [numerics.vector(part) for part in parts])
        if not found.left <= numerics.limit(0.0, used):
            return {}
        totals[name] = sum(found.factors)
    usual = sorted(totals.values())[len(totals) // 2] if totals else 0.0
    return {name: total / usual for name, total in totals.items()} if usual else {}


# --- what one process makes of each rank's samples --------------------------------------------------


def judge_by_rank(record: Record, runs: Sequence[Run], steps: list[Event], report: Report, because: str) -> None:
    """Compares the gradients of these steps with those of one process that has the samples of one rank in each run.

    These are their gradients before clipping; `because` says why one process is not given the samples of all.
    """

    def leave_open(why: str) -> None:
        report.cover("gradients", unchecked(f"{because}, and {why}"))

    errors: list[float] = []
    for step in steps:
        if not all(step["event"] in run.steps for run in runs):
            continue
        used = record.gradients(step)
        if (known := vectors(used, [run.gradients(step["event"]) for run in runs])) is None:
            continue
        found = numerics.fit(*known)
        counts = [count for run in runs if (count := _count(run, step)) is not None]
        right = [count / sum(counts) for count in counts] if len(counts) == len(runs) else None
        samples = sum(samples_of_steps([rank]).get(step["window"], 0) for rank in record.data.ranks)
        if right is not None and not any(_are_means(run, step) for run in runs) and {*counts} == {float(samples)}:
            right = [1.0] * len(runs)  # each loss is a part of the sum over the samples of all ranks
        if not found.left <= numerics.limit(0.0, used):
            leave_open("the ranks' gradients are no weighted mean of what one process makes of each rank's samples")
            return
        clipped = clipping(record, step)
        total = sum(found.factors) / (clipped or 1.0)
        is_unknown = _is_clipped(total, clipped, record, step)
        shares = [one / (sum(found.factors) if is_unknown else clipped or 1.0) for one in found.factors]
        are_weights = is_unknown or abs(total - 1) <= _NEAR
        if right is None and (not are_weights or _are_near(shares, [1 / len(runs)] * len(runs))):
            leave_open("it is not known over how many values each rank's loss is a mean")
            return
        if right is not None and not _are_near(shares, right):
            is_mean = are_weights and abs(sum(right) - 1) <= _NEAR
            weighs = mean_of_means(record, step, right, shares)
            report.add([weighs if is_mean else scaled(record, step, total / sum(right))])
            return
        errors.append(found.left)
    if not errors:
        leave_open(EVERY_ZERO)
        return
    report.remarks.append(f"{because}: {_BY_RANK_REMARK}")
    _cover(errors, report)


def _are_means(run: Run, step: Event) -> bool:
    return any(term["mean"] for one in run.rank.of("loss") if one["event"] == step["event"] for term in one["terms"])


def _count(run: Run, step: Event) -> float | None:
    """Over how many values the losses of one process's step take the mean; None where that is not known.

    A loss that is 1/f of a sum counts as a mean over f values.
    """
    losses = [one["terms"] for one in run.rank.of("loss") if one["event"] == step["event"]]
    terms: list[dict[str, Any]] = [term for each in losses for term in each]
    if not terms or not all(losses):
        return None
    if all(term["mean"] and term["count"] for term in terms):
        return float(terms[0]["count"]) * len(losses) if len({term["count"] for term in terms}) == 1 else None
    factors = {term["factor"] for term in terms}
    is_sum = not any(term["mean"] for term in terms) and len(factors) == 1 and all(len(each) == 1 for each in losses)
    return 1 / factors.pop() if is_sum and 0.0 not in factors else None


# --- one process that takes a step for each rank ----------------------------------------------------


def judge_in_turn(record: Record, run: Run, steps: list[Event], report: Report) -> bool:
    """Compares the gradients of these steps with those of one process that takes N steps for one of the ranks'.

        2 ranks        step 0: samples 0-3 and 4-7       step 1: samples 8-11 and 12-15
        one process    0-3    4-7                        8-11   12-15

    Each of its steps begins with the parameters that the ranks' step begins with. That its gradients add up to theirs
    shows that the samples are the same. Returns whether the comparison is conclusive.
    """
    taken = [step for step in steps if len(run.turns(step["event"])) == len(record.data.ranks)]  # it may end before
    sums = [(step, fit) for step in taken if (fit := _sum_of_turns(record, run, step)) is not None]
    if not all(found.left <= numerics.limit(0.0, record.gradients(step)) for step, found in sums):
        return False
    if not all(weight > 0 for _, found in sums for weight in found.factors):
        return False
    for step, found in sums:
        clipped = clipping(record, step)
        total = sum(found.factors) / (clipped or 1.0)
        are_equal = all(_is_near(one / found.factors[0], 1.0) for one in found.factors)
        is_mean = _is_near(total, 1.0) or _is_clipped(total, clipped, record, step)
        if not (are_equal or is_mean) or (are_equal and not are_alike(record, step)):
            return False
        if not is_mean:
            report.add([scaled(record, step, total)])
            return True
    if sums:
        report.remarks.append(IN_TURN_REMARK)
        _cover([found.left for _, found in sums], report)
    return bool(sums)


def _sum_of_turns(record: Record, run: Run, step: Event) -> numerics.Fit | None:
    known = vectors(record.gradients(step), run.turns(step["event"]))
    return None if known is None else numerics.fit(*known)


# --- the weights of a mean --------------------------------------------------------------------------


@dataclass(frozen=True)
class Weights:
    """The weights of the ranks in a mean over all their values.

    Attributes:
        shares: of each; together 1.
        factor: by which each rank's mean is multiplied in its loss, over all backward passes of a step.
        is_plain: whether the losses are means and nothing else.
    """

    shares: tuple[float, ...]
    factor: float
    is_plain: bool


def weights(record: Record, step: Event) -> Weights | None:
    """Returns how a mean over all values would weigh the ranks in a step; None where that is not known.

    Means of as many values on every rank count alike; means over different counts by these. A sum leaves it open, and
    so does a loss whose values may depend on several samples, such as similarities of all pairs.
    """
    ranks = _passes(record, step)
    first = ranks[0]
    if not first or not first[0] or any(len(passes) != len(first) for passes in ranks):
        return None
    every = [terms for passes in ranks for terms in passes]
    if any(len(terms) != len(first[0]) for terms in every):
        return None
    factor: float = sum(float(terms[0]["factor"]) for terms in first)
    is_plain = len(first) == 1 and len(first[0]) == 1 and factor == 1.0
    if all(_are_equal_means([terms[number] for terms in every]) for number in range(len(first[0]))):
        return Weights((1 / len(ranks),) * len(ranks), factor, is_plain)
    if len(first) == len(first[0]) == 1 and all(_is_mean(terms[0]) for terms in every):
        counts: list[float] = [float(passes[0][0]["count"]) for passes in ranks]
        factors = {passes[0][0]["factor"] for passes in ranks}
        total = sum(counts)
        if len(factors) == 1 and total:
            return Weights(tuple(count / total for count in counts), factor, is_plain)
    return None


def are_alike(record: Record, step: Event) -> bool:
    """Returns whether the losses of all backward passes of a step, on all ranks, are means of as many values."""
    found = weights(record, step)
    return found is not None and len(set(found.shares)) == 1


def are_divided_by_own_samples(record: Record, step: Event) -> bool:
    """Returns whether each loss of a step is a sum over a constant, the number of the samples of its rank in that step.

    As with `loss_sum / batch_size`, the batch size of a process: with the samples of all ranks, one process is divided
    by too few.
    """
    for rank, passes in zip(record.data.ranks, _passes(record, step), strict=True):
        samples = samples_of_steps([rank]).get(step["window"], 0)
        terms = [term for each in passes for term in each]
        if not samples or not terms or not all(passes):
            return False
        if any(term["mean"] or abs(term["factor"] * samples - 1) > _NEAR for term in terms):
            return False
    return True


def are_divided_alike_alone(record: Record, alone: Record, step: Event) -> bool:
    """Returns whether one process at its own pace takes as many samples as one rank, and divides as large sums alike.

    A constant by which sums are divided is then that of a process; what it is does not matter.
    """
    if not alone.ranks or not step["event"] < len(alone.ranks[0].steps):
        return False
    own = alone.ranks[0].steps[step["event"]]
    theirs = samples_of_steps(alone.ranks[:1]).get(own["window"], 0)
    counts = [samples_of_steps([rank]).get(step["window"], 0) for rank in record.data.ranks]
    every = [[term for terms in passes for term in terms] for passes in [*_passes(record, step), *_passes(alone, own)]]
    factors = [[(term["factor"], term["mean"]) for term in terms] for terms in every]
    sums = [abs(factor) for factor, is_mean in factors[-1] if not is_mean]
    is_divided = bool(sums) and 1.0 not in sums
    return is_divided and {*counts} == {theirs} and all(one == factors[-1] for one in factors)


def uneven_counts(record: Record, step: Event) -> list[float] | None:
    """Returns over how many values each rank takes the mean in one term of its loss, where they are not as many."""
    ranks = _passes(record, step)
    if any(len(passes) != 1 or len(passes[0]) != len(ranks[0][0]) for passes in ranks):
        return None
    for terms in zip(*(passes[0] for passes in ranks), strict=True):
        counts = [float(term["count"]) for term in terms if _is_mean(term)]
        if len(counts) == len(ranks) and len(set(counts)) > 1:
            return counts
    return None


def _passes(record: Record, step: Event) -> list[list[list[dict[str, Any]]]]:
    """The terms of the losses of a step, by rank and backward pass."""
    return [
        [one.get("terms") or [] for one in rank.in_window(step["window"], "backward")] for rank in record.data.ranks
    ]


def _is_mean(term: dict[str, Any]) -> bool:
    return bool(term["mean"]) and bool(term["count"]) and not _may_be_pairs(term["shape"])


def _are_equal_means(terms: list[dict[str, Any]]) -> bool:
    """Whether one term of all passes is the mean of as many values everywhere, each of which one sample makes."""
    first = terms[0]
    equal = all((one["factor"], one["count"]) == (first["factor"], first["count"]) for one in terms)
    return equal and all(map(_is_mean, terms))


def _may_be_pairs(shape: list[int]) -> bool:
    """Whether there is a column for every row, or several: a row may be a sample, and a column another one."""
    return len(shape) == 2 and shape[1] >= shape[0] > 1 and shape[1] % shape[0] == 0


def _is_near(number: float, right: float) -> bool:
    return abs(number - right) <= _NEAR * abs(right)


def _is_clipped(total: float, clipped: float | None, record: Record, step: Event) -> bool:
    """Whether a gradient is smaller than the mean by a clipping of an unknown norm, or by the script's own code.

    It is not if it is divided by the number of ranks, or of micro-batches, once or twice.
    """
    size, micro = record.size, max(step["micro"], 1)
    is_divided = any(_is_near(total * times, 1.0) for times in (size, size**2, micro, micro**2, size * micro))
    return 0 < total < 1 and (clipped is None or not (is_divided or _is_near(total, 1.0)))


def _are_near(weights: Sequence[float], right: Sequence[float]) -> bool:
    return all(abs(one - other) <= _NEAR for one, other in zip(weights, right, strict=True))


# --- findings, and what they depend on --------------------------------------------------------------


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
    """Returns the finding for ranks whose share in an average is not that of their values."""
    correct, used = (", ".join(f"{one:.3f}" for one in each) for each in (right, shares))
    return Finding(
        code="gradient-differs",
        step=step["event"],
        where=record.ranks[0].backward_of(step),
        cause=f"at step {step['event']} each rank's loss is a mean over its own number of values, and the ranks count "
        f"{used}: the mean over all values weighs them {correct}",
        fix="divide each rank's sum by the number of items of all ranks, times the world size; samestep does it in "
        "batches.mean(losses)",
    )


def clipping(record: Record, event: Event) -> float | None:
    """Returns by what the ranks' gradient was multiplied when its norm was clipped; None where that is not known."""
    first = record.ranks[0]
    factors = [min(1.0, one["most"] / (one["norm"] + 1e-6)) for one in first.in_window(event["window"], "clip")]
    calls = len(first.in_window(event["window"], "clipping"))  # the norm of cut gradients is not recorded
    if not calls and not factors:
        return 1.0
    return factors[0] if len(factors) == 1 == max(calls, 1) else None


def brings_together(rank: Rank, steps: Sequence[Event]) -> str | None:
    """Returns the line at which something of all ranks is brought together before the last backward pass of a step.

    It must be so in the first two of these steps: before one of them an evaluation may lie.
    """
    found = []
    for step in steps[:2]:
        window = rank.by_window.get(step["window"], [])
        backwards = [place for place, one in enumerate(window) if one["kind"] == "backward"]
        before = window[: backwards[-1]] if backwards else []
        found.append([one["where"] for one in before if one["kind"] == "collective" and one["op"] in _BRINGING])
    return next((where for where in found[0] if where in found[-1]), None) if found else None
