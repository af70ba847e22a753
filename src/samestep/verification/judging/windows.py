"""Whether the micro-batches of a step add up to what one batch of all their samples would bring.

    recorded     g₁ + g₂ + … + g_m      each of one micro-batch, as the script weighs it
    merged       G + G + … + G          the same code, and each time the samples of all of them

One process makes this mistake too, where each micro-batch divides by something of its own (its tokens, say).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from samestep.verification import numerics
from samestep.verification.findings import Finding
from samestep.verification.journal import Event
from samestep.verification.judging.record import Rank, Record, Run
from samestep.verification.report import Report

_APART = 1e-3  # of the gradient's norm; micro-batches of other shapes round otherwise
_ALIKE = 1e-3  # of a weight
_EXPLAINED = 0.05  # of the difference, at most, may be left by the weights

Again = Callable[[list[Event]], Run]


def judge(record: Record, steps: list[Event], whole: Run, merged: Again, apart: Again, report: Report) -> None:
    """Compares the script alone with itself, given all samples of a step at once.

    Not judged: normalisation over the batch, whose statistics differ by design, and a loss that no weights explain,
    since it compares samples with each other.

    Args:
        record: of the ranks.
        steps: whose gradients were kept.
        whole: the script alone.
        merged: runs it with, in place of each micro-batch of these steps, all of them.
        apart: runs it as it is, and keeps the gradients after each backward pass of these steps.
        report: to add to.
    """
    rank = record.ranks[0]
    wanted = [
        step
        for step in steps
        if len(micro_batches(rank, step["window"])) > 1 and not _are_weighed(rank.in_window(step["window"], "backward"))
    ]
    if not wanted or any(event["norms"] for event in rank.of("wrap")):
        return
    together = merged(wanted)
    if together.unjoinable is not None or together.rank.of("chance", "out_of_step"):
        return
    for step in wanted:
        if step["event"] in together.steps and _differ(step, whole, together):
            weights = _weights(step, together, apart([step]))
            if weights is not None:
                report.add([_finding(record, step, weights)])
            return


def _are_weighed(backwards: Sequence[Event]) -> bool:
    """Whether the means of micro-batches have constant factors of their own: one for each source of data, say."""
    means = [[term["factor"] for term in one.get("terms") or () if term["mean"]] for one in backwards]
    return len({tuple(factors) for factors in means if factors}) > 1


def _differ(step: Event, whole: Run, together: Run) -> bool:
    alone = whole.gradients(step["event"])
    distance = numerics.distance(together.gradients(step["event"]), alone)
    return math.isfinite(distance.whole) and distance.whole > max(_APART, numerics.limit(0.0, alone))


def _weights(step: Event, together: Run, run: Run) -> list[float] | None:
    """Returns how often one batch counts each micro-batch; None where no weights explain it, or all are 1."""
    kept = [one["kept"] for one in run.rank.of("micro")]
    if len(kept) < 2 or None in kept:
        return None
    sums = [run.record.value(0, number) for number in kept]
    target = numerics.flat(together.gradients(step["event"]), sums[-1])
    after = [numerics.flat(one, sums[-1]) for one in sums]
    parts = [after[0], *(one - before for before, one in pairwise(after))]
    found = numerics.fit(target, parts)
    moved = float((target - after[-1]).norm() / target.norm().clamp_min(1e-300))
    total = sum(found.factors)
    if found.left > _EXPLAINED * moved or total <= 0:
        return None
    weights = [factor * len(parts) / total for factor in found.factors]
    return None if all(abs(weight - 1) < _ALIKE for weight in weights) else weights


def _finding(record: Record, step: Event, weights: list[float]) -> Finding:
    batches = [micro_batches(rank, step["window"]) for rank in record.ranks]
    sizes = [sum(event["size"] for event in events) for events in zip(*batches, strict=False)]  # over all ranks
    by_size = [size * len(sizes) / max(sum(sizes), 1) for size in sizes]
    is_even = len(set(sizes)) == 1
    is_note = not is_even and all(abs(weight - other) < 0.01 for weight, other in zip(weights, by_size, strict=False))
    shares = ", ".join(f"{weight:.3f}" for weight in weights)
    uneven = "whose micro-batches hold different numbers of samples" if is_note else "though their parts are not alike"
    return Finding(
        code="gradient-differs",
        severity="note" if is_note else "error",
        step=step["event"],
        where=record.ranks[0].backward_of(step),
        cause=f"at step {step['event']} the {len(weights)} micro-batches count alike, {uneven}: in one batch of "
        f"all their samples they would count {shares} times",
        fix="divide every micro-batch's sum by the items of the whole step (tokens, say), counted before its first "
        "backward, over all ranks; samestep does it in batches.mean(losses, weight=…)",
    )


def micro_batches(rank: Rank, window: int) -> list[Event]:
    """Returns the batches of a window that come from the DataLoader which yields most of them."""
    by_key: dict[Any, list[Event]] = {}
    for event in rank.in_window(window, "batch"):
        if event["training"]:
            by_key.setdefault(event["key"], []).append(event)
    return max(by_key.values(), key=len, default=[])
