"""Whether the micro-batches of a step add up to what one batch of all their samples would bring.

    recorded     g₁ + g₂ + … + g_m      each of one micro-batch, as the script weighs it
    merged       G + G + … + G          the same code, and each time the samples of all of them

A mean over equal parts is the mean over all, so both are one gradient. Where each micro-batch divides by something of
its own (its tokens, its positives), they are not: the merged gradient is some Σ wᵢ·gᵢ, and the weights tell. It is a
mistake that one process makes too, so no other comparison sees it.

Left alone: normalisation over the batch, whose statistics are others by design; a loss that no weights explain, which
compares samples with each other; a window whose micro-batches differ in their number of samples, which is a note.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

from samestep.verification import numerics
from samestep.verification.findings import Finding
from samestep.verification.journal import Event
from samestep.verification.judging.record import Rank, Record
from samestep.verification.judging.single import Run
from samestep.verification.report import Report

__all__: list[str] = []

_APART = 1e-3  # of the gradient's norm; micro-batches of other shapes round otherwise
_ALIKE = 1e-3  # of a weight
_EXPLAINED = 0.05  # of the difference, at most, may be left by the weights

Again = Callable[[list[Event]], Run]


class Windows:
    """Of the script alone with itself, given all samples of a step at once.

    Args:
        record: of the ranks.
        merged: runs the script with, in place of each micro-batch of these steps, all of them.
        apart: runs it as it is, and keeps the gradients after each backward of these steps.
    """

    def __init__(self, record: Record, merged: Again, apart: Again) -> None:
        self._record = record
        self._merged = merged
        self._apart = apart

    def judge(self, steps: list[Event], whole: Run, report: Report) -> None:
        """Adds what the comparison at these steps tells; `whole` is the script alone as it is."""
        rank = self._record.ranks[0]
        wanted = [step for step in steps if len(micro_batches(rank, step["window"])) > 1]
        if not wanted or any(event["norms"] for event in rank.of("wrap")):
            return
        merged = self._merged(wanted)
        if merged.unjoinable is not None or merged.record.ranks[0].of("chance", "out_of_step"):
            return
        for step in wanted:
            if step["event"] in merged.steps and self._differ(step, whole, merged):
                report.add(self._explained(step, merged))
                return

    def _differ(self, step: Event, whole: Run, merged: Run) -> bool:
        alone = whole.gradients(step["event"])
        distance = numerics.distance(merged.gradients(step["event"]), alone)
        return math.isfinite(distance.whole) and distance.whole > max(_APART, numerics.limit(0.0, alone))

    def _explained(self, step: Event, merged: Run) -> Iterator[Finding]:
        run = self._apart([step])
        told = [one for rank in run.record.ranks for one in rank.of("micro")]
        if len(told) < 2 or any(one["kept"] is None for one in told):
            return
        sums = [run.record.value(0, one["kept"]) for one in told]
        target = numerics.flat(merged.gradients(step["event"]), sums[-1])
        after = [numerics.flat(one, sums[-1]) for one in sums]
        parts = [after[0], *(one - before for before, one in pairwise(after))]
        found = numerics.fit(target, parts)
        moved = float((target - after[-1]).norm() / target.norm().clamp_min(1e-300))
        total = sum(found.factors)
        if found.left > _EXPLAINED * moved or total <= 0:
            return
        weights = [factor * len(parts) / total for factor in found.factors]
        if all(abs(weight - 1) < _ALIKE for weight in weights):
            return
        yield self._finding(step, weights)

    def _finding(self, step: Event, weights: list[float]) -> Finding:
        rank = self._record.ranks[0]
        sizes = self._sizes(step["window"])
        by_size = [size * len(sizes) / max(sum(sizes), 1) for size in sizes]
        even = len(set(sizes)) == 1
        note = not even and all(abs(weight - other) < 0.01 for weight, other in zip(weights, by_size, strict=False))
        shares = ", ".join(f"{weight:.3f}" for weight in weights)
        uneven = "whose micro-batches hold different numbers of samples" if note else "though their parts are not alike"
        return Finding(
            code="gradient-differs",
            severity="note" if note else "error",
            step=step["event"],
            where=rank.backward_of(step),
            cause=f"at step {step['event']} the {len(weights)} micro-batches count alike, {uneven}: in one batch of "
            f"all their samples they would count {shares} times",
            fix="divide every micro-batch's sum by the items of the whole step (tokens, say), counted before its first "
            "backward, over all ranks; samestep does it in batches.mean(losses, weight=…)",
        )

    def _sizes(self, window: int) -> list[int]:
        """How many samples each micro-batch has, over all ranks."""
        told = [micro_batches(rank, window) for rank in self._record.ranks]
        return [sum(event["size"] for event in events) for events in zip(*told, strict=False)]


def micro_batches(rank: Rank, window: int) -> list[Event]:
    """Returns the batches of a window that come from the DataLoader which yields most of them."""
    by_key: dict[Any, list[Event]] = {}
    for event in rank.by_window.get(window, []):
        if event["kind"] == "batch" and event["training"]:
            by_key.setdefault(event["key"], []).append(event)
    return max(by_key.values(), key=len, default=[])
