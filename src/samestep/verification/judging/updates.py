"""Whether a step makes of parameters and optimizer state what it makes of them in one process.

The script alone takes the step from the ranks' parameters, optimizer state, gradients and rates (reference/updates.py),
so what differs is made by the optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from samestep.text import plural
from samestep.verification import numerics
from samestep.verification.findings import AGREES, PROVED, REFUTED, Finding, unchecked
from samestep.verification.journal import Event
from samestep.verification.judging import rates
from samestep.verification.judging.others import Others
from samestep.verification.judging.record import BY_THEMSELVES, Record, Run
from samestep.verification.judging.states import averaged_behind, healed_at_once
from samestep.verification.report import Report

_ROUNDINGS_OF_VALUES = 8.0  # units in the last place of a parameter, which hide a small update
_SAME = 1e-3  # of a factor
_SMALL = 1e-2  # of the usual update; a tensor that moves less is held against this
_FOR_ONE = "compute each parameter's update from the whole tensor and from values that all ranks share"


@dataclass(frozen=True)
class _Difference:
    """What differs most between two results of a step: a parameter, or a part of its state."""

    name: str
    key: str | None  # of the state; None for the parameter itself
    error: float  # of the norm of the update, or of the state
    limit: float
    factor: float | None  # by which the ranks' update is a multiple of one process's

    @property
    def place(self) -> tuple[str, str | None]:
        return self.name, self.key


@dataclass
class Updates:
    """Compares the steps of the ranks with those of the script alone, `whole`."""

    record: Record
    whole: Run
    others: Others

    def judge(self, report: Report) -> set[int]:
        """Adds what the comparison tells; returns the steps that are as in one process."""
        if REFUTED in {report.coverage.get(name) for name in ("initial_state", "parameter_order", "parameters")}:
            report.cover("updates", unchecked("the ranks train different models"))
            return set()
        if self.record.by_themselves:
            report.cover("updates", unchecked(BY_THEMSELVES))
            return set()
        own = averaged_behind(self.record)
        if own is not None:
            why = f"at step {own} each rank steps with a gradient of its own, and one process with that of all"
            report.cover("updates", unchecked(why))
            report.add(self._averaged_otherwise(own))
            return set()
        steps = [step for step in self.record.ranks[0].steps[: self.record.steps] if self._is_kept(step)]
        compared = 0
        right: set[int] = set()
        are_equal = True
        worst, known = 0.0, 0.0
        notes: list[Finding] = []
        for step in steps:
            differences = list(self._differences(self.record, self.whole, step))
            compared += any(one.key is None and not math.isnan(one.error) for one in differences)
            wrong = [one for one in differences if one.error > one.limit]
            if wrong and not notes and (times := self._scaled_by_hand(step, differences)) is not None:
                notes = [_rate_by_hand(step, times)]
            if notes and step.get("by_hand"):
                wrong = []  # a momentum of later steps comes from other weights, too
            if wrong and (lasting := self._beyond_rounding(step, wrong)):
                report.add([self._finding(step, max(lasting, key=lambda one: one.error))])
                return right
            right.add(step["event"])
            kept = [one.error for one in differences if one.error <= one.limit]
            seen = [one.error for one in differences if one.error <= one.limit < 1]  # else rounding hides the update
            worst, known = max([worst, *seen]), max(known, len(wrong))
            are_equal &= not wrong and not any(kept) and not notes
        report.add(notes)
        if not compared:
            report.cover("updates", unchecked(self._why(steps)))
        elif are_equal:
            report.cover("updates", PROVED, f"{plural(compared, 'step')} from the ranks' state and gradients")
        else:
            report.cover("updates", AGREES, f"worst error {worst:.1e} of an update, {plural(compared, 'step')}")
        return right

    def _scaled_by_hand(self, step: Event, differences: Sequence[_Difference]) -> float | None:
        """By what the script's own code scales its rate for the ranks, where batches have the size of one rank's."""
        if not step.get("by_hand") or self.others.own_pace is None:
            return None
        moving = [one for one in differences if one.key is None and not math.isnan(one.error)]
        factors = [one.factor for one in moving if one.factor is not None]
        if len(factors) < len(moving) or not factors or max(factors) - min(factors) > _SAME * max(factors):
            return None
        is_rate = 1 < factors[0] <= self.record.size * (1 + _SAME) and not any(one.key for one in differences)
        return factors[0] if is_rate and not rates.are_as_many(self.record, self.others.own_pace()) else None

    def _averaged_otherwise(self, index: int) -> Iterator[Finding]:
        """Whether the average of the ranks' first steps is no step of one process: only some optimizers are linear.

        Behind it each rank's optimizer has a state of its own, and one process's none of them.
        """
        step = self.record.ranks[0].steps[index]
        if index or not healed_at_once(self.record, index) or not self._is_kept(step):
            return
        wrong = [one for one in self._differences(self.record, self.whole, step) if one.error > one.limit]
        if lasting := self._beyond_rounding(step, wrong) if wrong else []:
            worst = max(lasting, key=lambda one: one.error)
            yield Finding(
                code="update-differs",
                step=step["event"],
                tensor=worst.name,
                where=step["where"],
                cause=f"at step {step['event']} each rank steps with a gradient of its own, and the average of what "
                f"they make of {worst.name} is not what one process makes of it: an error of {worst.error:.1e} of its "
                "update; that average is one process's only where the optimizer is linear in the gradient, as SGD is",
                fix="average gradients before the step, not parameters behind it: "
                "dist.all_reduce(p.grad, op=dist.ReduceOp.SUM); p.grad /= dist.get_world_size()",
            )

    def _is_kept(self, step: Event) -> bool:
        apart = self.whole.rank.of("out_of_step")[:1]
        within = self.record.averages_within(step)
        is_unknown = within and (not self.record.parts(step) or self.record.carries_apart(step))
        return not is_unknown and (
            step["event"] in self.whole.steps
            and self.whole.steps[step["event"]]["optimizer"] == step["optimizer"]
            and all(step["window"] < min(one["window"], one["own"]) for one in apart)
            and self.record.updated(step) is not None
            and self.whole.update(step["event"]) is not None
        )

    def _why(self, steps: list[Event]) -> str:
        if not steps and any(map(self.record.carries_apart, self.record.ranks[0].steps[: self.record.steps])):
            return "each rank's optimizer has a state of its own, and averages while it steps"
        if not steps:
            return "no step was taken alone from the ranks' state"
        return "no step changes a parameter"

    def _differences(self, record: Record, alone: Run, step: Event) -> Iterator[_Difference]:
        """Yields how far each parameter and each part of its state differs; NaN for a parameter that does not move."""
        before = record.state(step["window"])["parameters"].get(step["optimizer"], {})
        ours, theirs = _made(record, step), alone.update(step["event"])
        coarsest = record.sent_in(step) if record.averages_within(step) else 0.0
        both = {}
        for name, right in theirs["parameters"].items():
            mine, earlier = ours["parameters"].get(name), before.get(name)
            if mine is not None and earlier is not None and mine.shape == earlier.shape == right.shape:
                both[name] = mine, right, earlier
        usual = _usual([(right, earlier) for _, right, earlier in both.values()])
        for name, (mine, right, earlier) in both.items():
            yield _of_parameter(name, mine, right, earlier, usual, coarsest)
        of_shards = record.of_shards(step)
        for name, state in theirs["states"].items():
            for key, right in state.items():
                mine = ours["states"].get(name, {}).get(key)
                if mine is not None and (name, key) not in of_shards:
                    yield _of_state(name, key, mine, right, coarsest)

    def _beyond_rounding(self, step: Event, wrong: list[_Difference]) -> list[_Difference]:
        """Returns what neither the run in another order nor the run in float64 shows to be rounding."""
        again = self.others.permuted()
        if step["event"] in again.steps and again.update(step["event"]) is not None:
            between = self._between(self.whole, again, step)
            floors = {one.place: one.error for one in between if not math.isnan(one.error)}
            wrong = [one for one in wrong if one.error > numerics.ABOVE_FLOOR * floors.get(one.place, 0.0) + one.limit]
        if not wrong or self.others.in_float64 is None:
            return wrong
        record, alone, _ = self.others.in_float64()
        steps = [one for rank in record.ranks[:1] for one in rank.steps if one["event"] == step["event"]]
        if not steps or record.updated(steps[0]) is None or alone.update(step["event"]) is None:
            return wrong
        exact = {one.place: one.error for one in self._differences(record, alone, steps[0])}
        return [one for one in wrong if not numerics.is_rounding(one.error, exact.get(one.place, math.inf))]

    def _between(self, one: Run, other: Run, step: Event) -> Iterator[_Difference]:
        """How far two runs of the script alone come apart in a step."""
        before = self.record.state(step["window"])["parameters"].get(step["optimizer"], {})
        first, second = one.update(step["event"]), other.update(step["event"])
        usual = _usual([(right, before[name]) for name, right in first["parameters"].items() if name in before])
        for name, right in first["parameters"].items():
            if name in before and name in second["parameters"]:
                yield _of_parameter(name, second["parameters"][name], right, before[name], usual)
        for name, state in first["states"].items():
            for key, right in state.items():
                yield _of_state(name, key, second["states"].get(name, {}).get(key, right), right)

    def _finding(self, step: Event, found: _Difference) -> Finding:
        size = self.record.size
        if found.factor is not None:
            near = abs(found.factor / size - 1) < _SAME or abs(found.factor * size - 1) < _SAME
            cause = f"{found.factor:.4g} times one process's" + (f": {size} is the number of ranks" if near else "")
        else:
            cause = f"not one process's: an error of {found.error:.1e} of its norm"
            if self.record.is_cut:
                cause += "; each rank updates its shard by itself"
        alike = "parameters and gradients" if step.get("by_hand") else "parameters, gradients and rate"
        resumed = {event["event"] for rank in self.record.ranks for event in rank.of("resumed")}
        when = f"at step {step['event']}" + (", the first behind a load" if step["event"] in resumed else "")
        what = f"the update of {found.name}" if found.key is None else f"the state {found.key!r} of {found.name}"
        return Finding(
            code="update-differs",
            step=step["event"],
            tensor=found.name,
            factor=None if found.factor is None else round(found.factor, 6),
            where=step["where"],
            cause=f"{when}, from the same {alike}, {what} is {cause}",
            fix=_FOR_ONE,
        )


def _rate_by_hand(step: Event, times: float) -> Finding:
    return Finding(
        code="update-differs",
        severity="note",
        step=step["event"],
        where=step["where"],
        factor=round(times, 6),
        cause=f"at step {step['event']} the script's own code moves all parameters {times:.4g} times as far as in one "
        "process, whose batches have the size of one rank's: its rate is scaled with the ranks",
        fix=None,
    )


def _made(record: Record, step: Event) -> Any:
    """Returns what the ranks have made in a step; where they average parameters after it, only these."""
    if averaged_behind(record) != step["event"]:
        return record.update(step)
    behind = record.state(step["window"] + 1)
    parameters = {} if behind is None else behind["parameters"].get(step["optimizer"], {})
    return {"parameters": parameters, "states": {}}


def _usual(pairs: Sequence[tuple[Any, Any]]) -> float:
    """Returns how far one number moves in a step: the root of the mean square over all parameters."""
    moved = [numerics.vector(after) - numerics.vector(before) for after, before in pairs]
    numbers = sum(one.numel() for one in moved)
    usual = math.sqrt(sum(float(one.square().sum()) for one in moved) / numbers) if numbers else 0.0
    return usual if math.isfinite(usual) else 0.0


def _of_parameter(name: str, mine: Any, right: Any, before: Any, usual: float, coarsest: float = 0.0) -> _Difference:
    """An update that is nearly zero is held against the `usual` one: its true value may be zero."""
    one, other, start = (numerics.vector(value) for value in (mine, right, before))
    update, moved = other - start, one - start
    if not update.any() and not moved.any():
        return _Difference(name, None, math.nan, 0.0, None)
    norm = max(float(update.norm()), float(moved.norm()), _SMALL * usual * math.sqrt(one.numel()))
    unit = numerics.unit({name: mine})
    error = float((one - other).norm()) / norm
    hidden = _ROUNDINGS_OF_VALUES * unit * float(other.norm()) / norm
    fitted = numerics.fit(moved, [update])
    is_multiple = fitted.left < max(hidden, _SAME) and abs(fitted.factors[0] - 1) > _SAME and bool(update.any())
    limit = numerics.limit(0.0, {name: mine}, coarsest) + hidden
    return _Difference(name, None, error, limit, fitted.factors[0] if is_multiple else None)


def _of_state(name: str, key: str, mine: Any, right: Any, coarsest: float = 0.0) -> _Difference:
    if hasattr(mine, "layout") != hasattr(right, "layout"):
        return _Difference(name, key, 0.0, 0.0, None)  # of an optimizer that has not come to it
    if not hasattr(mine, "layout") and not isinstance(mine, int | float):
        return _Difference(name, key, 0.0, 0.0, None)  # a history of directions
    if not hasattr(mine, "layout"):
        same = mine == right or (isinstance(mine, float) and math.isclose(mine, float(right), rel_tol=1e-4))
        return _Difference(name, key, 0.0 if same else 1.0, 0.0, None)
    if mine.shape != right.shape or mine.layout != right.layout:
        return _Difference(name, key, 0.0, 0.0, None)  # a step counter on one side, say
    one, other = numerics.vector(mine), numerics.vector(right)
    norm = max(float(one.norm()), float(other.norm()), 1e-300)
    return _Difference(name, key, float((one - other).norm()) / norm, numerics.limit(0.0, {name: mine}, coarsest), None)
