"""Compares what a script that cuts its model over the ranks by itself has whole, in the first step, with one process.

    one process   up.weight [64, 32]   norm.weight [32]   bias [32]
    rank 0        up.weight [32, 32]   norm.weight [32]   bias [32]       the last two begin with one process's numbers

Gradients of what a rank holds whole can be compared where the rest cannot: tensor or expert parallelism, say.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from samestep.text import listed
from samestep.verification import numerics
from samestep.verification.findings import Finding
from samestep.verification.journal import Event
from samestep.verification.judging.record import Record, Run
from samestep.verification.report import Report

_FEWEST = 3  # gradients that are one process's
_MOST = 0.5  # of those that are compared may differ
_NEAR = 1e-3  # of a factor
_LARGE = 1e-2  # of a gradient's norm: more than rounding on another way through the model makes


def judge(record: Record, whole: Run, report: Report) -> None:
    """Adds which gradients of the first step are not those of one process; `whole` is the script alone.

    If most of these gradients are one process's, so are the parts that are not seen, and one that is not is wrong by
    itself: its parts on the ranks are not added up, or added up twice. If some are one process's, and all others N
    times as large at the same rates, those are wrong, however many they are: of experts, say.
    """
    report.add(_findings(record, whole))


def _findings(record: Record, whole: Run) -> Iterator[Finding]:
    step = record.ranks[0].steps[0]
    alone = next((one["parameters"] for one in whole.rank.of("own_digests")), None)
    start = next((one["parameters"] for one in record.ranks[0].of("start")), None)
    if step["kept"] is None or alone is None or start is None or step["event"] not in whole.steps:
        return
    used, right = record.used(step), whole.gradients(step["event"])
    same = [name for name, digest in start.items() if alone.get(name) == digest]
    same = [name for name in same if used.get(name) is not None and right.get(name) is not None and right[name].any()]
    found = numerics.distance({name: used[name] for name in same}, {name: right[name] for name in same})
    wrong = [name for name, error in found.errors.items() if error > max(_LARGE, numerics.limit(0.0, used))]
    if not wrong or len(same) - len(wrong) < _FEWEST:
        return
    comparable = wrong if _has_rates_of_one_process(step, whole) else []
    factors = {name: _factor(used[name], right[name], record.size) for name in comparable}
    are_scaled = all(factors.get(name) is not None for name in wrong)
    if len(wrong) > _MOST * len(same) and not are_scaled:
        return
    own = record.own(step)
    for name in wrong:
        if _is_partial(name, used, right, [] if own is None else own, record.size):
            cause = (
                f"at step 0 each rank steps with its own part of the gradient of {listed(wrong)}: one process's is the "
                "sum of the ranks'"
            )
            yield Finding(code="gradients-not-synchronised", **_about(record, wrong[0], cause))
            return
        if (factor := factors.get(name)) is not None:
            what = listed(wrong) if are_scaled else name
            cause = f"at step 0 the gradient of {what} is {factor:.4g} times that of one process, and others are not"
            yield Finding(code="gradient-scale", factor=round(factor, 6), **_about(record, name, cause))
            return


def _is_partial(name: str, used: Any, right: Any, own: list[Any], size: int) -> bool:
    """Whether a rank steps with its own gradient, and one process's is the sum of the ranks'."""
    parts = [numerics.vector(part[name]) for part in own if part.get(name) is not None]
    mine, one = numerics.vector(used[name]), numerics.vector(right[name])
    if len(parts) != size or any(part.shape != one.shape for part in parts):
        return False
    return _is_near(sum(parts[1:], parts[0]), one) and _is_near(mine, parts[0])


def _factor(mine: Tensor, one: Tensor, size: int) -> float | None:
    """What a gradient is a multiple of one process's by, where that is N or an Nth."""
    fitted = numerics.fit(numerics.vector(mine), [numerics.vector(one)])
    factor = fitted.factors[0]
    is_near = any(abs(factor / other - 1) < _NEAR for other in (size, 1 / size))
    return factor if fitted.left <= _LARGE and is_near else None


def _has_rates_of_one_process(step: Event, whole: Run) -> bool:
    rates = next((one["rates"] for one in whole.rank.of("rates") if one["event"] == step["event"]), None)
    return bool(rates == step["rates"])


def _is_near(one: Tensor, other: Tensor) -> bool:
    return float((one - other).norm()) <= _LARGE * float(other.norm())


def _about(record: Record, name: str, cause: str) -> dict[str, Any]:
    return {
        "step": 0,
        "tensor": name,
        "where": record.ranks[0].steps[0]["where"],
        "cause": cause,
        "fix": "bring the gradient of what every rank has whole together as often as its parts are computed: once",
    }
