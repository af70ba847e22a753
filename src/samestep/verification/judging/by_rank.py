"""Whether the ranks' gradient is that of all their samples, by what one process makes of each rank's samples alone.

    s₀ … s_N    one process, with the samples and the random numbers of one rank       g = Σ wᵣ·sᵣ, as measured
    c₀ … c_N    values over which its loss takes the mean: 1/f of a sum times f         right: wᵣ = cᵣ / Σ c

So it is judged where the batches of all ranks cannot be joined to one, or one process cannot draw what they have drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from samestep.text import plural
from samestep.verification import numerics
from samestep.verification.findings import DECLARED, unchecked
from samestep.verification.journal import Event
from samestep.verification.judging.average import EVERY_ZERO, mean_of_means, scaled
from samestep.verification.judging.record import Record
from samestep.verification.judging.single import Run
from samestep.verification.report import Report

__all__: list[str] = []

_NEAR = 1e-3  # of a weight
_REMARK = "the ranks' gradients were compared with a weighted mean of what one process makes of each rank's samples"
_OTHER = "the ranks' gradients are no weighted mean of what one process makes of each rank's samples"
_UNKNOWN = "it is not known over how many values each rank's loss is a mean"


def judge(record: Record, runs: Sequence[Run], steps: list[Event], report: Report, because: str) -> None:
    """Adds what the comparison at these steps tells.

    Args:
        record: of the ranks.
        runs: the script alone, with the samples of one rank each.
        steps: of the first rank.
        report: to add to.
        because: why one process is not given the samples of all.
    """
    worst, seen = 0.0, 0
    for step in steps:
        if not all(step["event"] in run.steps for run in runs):
            continue
        used = record.gradients(step)
        parts = [run.gradients(step["event"]) for run in runs]
        ours, theirs = numerics.flat(used, *parts), [numerics.flat(part, used, *parts) for part in parts]
        if not ours.any() and not any(part.any() for part in theirs):
            continue
        found = numerics.fit(ours, theirs)
        counts = [count for run in runs if (count := _count(run, step)) is not None]
        right = [count / sum(counts) for count in counts] if len(counts) == len(runs) else None
        if not found.left <= numerics.limit(0.0, used):
            report.cover("gradients", unchecked(f"{because}, and {_OTHER}"))
            return
        total = sum(found.factors)
        are_weights = abs(total - 1) <= _NEAR
        if right is None and (not are_weights or _are_near(found.factors, [1 / len(runs)] * len(runs))):
            report.cover("gradients", unchecked(f"{because}, and {_UNKNOWN}"))
            return
        if right is not None and not _are_near(found.factors, right):
            weighs = mean_of_means(record, step, right, found.factors)
            report.add([weighs if are_weights else scaled(record, step, total)])
            return
        worst, seen = max(worst, found.left), seen + 1
    if not seen:
        report.cover("gradients", unchecked(f"{because}, and {EVERY_ZERO}"))
        return
    report.remarks.append(f"{because}: {_REMARK}")
    report.cover("gradients", DECLARED, f"worst error {worst:.1e}, {plural(seen, 'step')}")


def _are_near(weights: Sequence[float], right: Sequence[float]) -> bool:
    return all(abs(one - other) <= _NEAR for one, other in zip(weights, right, strict=True))


def _count(run: Run, step: Event) -> float | None:
    """Over how many values the losses of one process's step take the mean; None where that is not known."""
    told = [one["terms"] for rank in run.record.ranks for one in rank.of("loss") if one["event"] == step["event"]]
    terms: list[dict[str, Any]] = [term for each in told for term in each]
    if not terms or not all(told):
        return None
    if all(term["mean"] and term["count"] for term in terms):
        return float(terms[0]["count"]) * len(told) if len({term["count"] for term in terms}) == 1 else None
    factors = {term["factor"] for term in terms}
    is_sum = not any(term["mean"] for term in terms) and len(factors) == 1 and all(len(each) == 1 for each in told)
    return 1 / factors.pop() if is_sum and 0.0 not in factors else None
