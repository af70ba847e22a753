"""Whether the gradients of N ranks are those of one process, and if not, what they are instead.

g    of the ranks          r    of the script alone, with all samples          s₁ … s_N   alone, with one rank's

g = r                      the same, up to rounding that is measured
g = c·r                    a wrong scale: c = 1/N says that a sum was averaged
g = mean(s), r = Σ wᵢ·sᵢ   a mean of means: the ranks' parts count alike though they are not alike in size
g = mean(s), r otherwise   the loss of the whole batch is no mean over its parts (in-batch negatives): declared
anything else              is told with its worst tensor
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from samestep.verification import numerics
from samestep.verification.findings import AGREES, DECLARED, REFUTED, Finding, unchecked
from samestep.verification.journal import Event
from samestep.verification.judging.rates import Rates, counted_in_parts, schedule_steps
from samestep.verification.judging.record import Rank, Record
from samestep.verification.judging.samples import loads_for_all
from samestep.verification.judging.single import Run
from samestep.verification.judging.virtual_ranks import VirtualRanks
from samestep.verification.judging.windows import Windows
from samestep.verification.judging.words import plural
from samestep.verification.report import Report

__all__: list[str] = []

_SAME_RATE = 1e-3  # of a rate
_MOST_LOST = 0.05  # of the gradient's norm, by a hook that only rounds
_EXPLAINED = 0.02  # a fit that leaves less than this share of a large error unexplained explains it


@dataclass(frozen=True)
class Others:
    """Further runs of the script alone, made where they are needed.

    Attributes:
        permuted: with the samples of each batch in another order.
        of_ranks: with what each rank used, for itself.
        virtual_ranks: as each rank would run it, in a process group of its own.
        merged: with all samples of a step in place of each of its micro-batches, at these steps.
        apart: as it is, keeping what adds up in these steps.
    """

    permuted: Callable[[], Run]
    of_ranks: Callable[[], list[Run]]
    virtual_ranks: Callable[[], list[Run]]
    merged: Callable[[list[Event]], Run] | None = None
    apart: Callable[[list[Event]], Run] | None = None


@dataclass
class Comparison:
    """Of the ranks with the script alone.

    Attributes:
        record: of the ranks.
        whole: the script alone, with what all ranks used.
        others: further runs.
    """

    record: Record
    whole: Run
    others: Others

    def judge(self, report: Report) -> None:
        """Adds what the comparison tells."""
        loader = loads_for_all(self.record) if self.whole.is_out_of_step else None
        if loader is not None:
            why = (
                f"rank {loader} loads for all ranks and sends it on, several batches at once, and one process does not"
            )
            report.cover("gradients", unchecked(why))
            return
        report.add(self._out_of_step())
        report.add(self._rates())
        mine = [event for event in self.record.ranks[0].steps[: self.record.steps] if event["kept"] is not None]
        common = [event for event in mine if event["event"] in self.whole.steps]
        if not common:
            report.cover("gradients", unchecked(self._why()))
            return
        if report.coverage.get("gradients") == REFUTED:
            return
        if REFUTED in {report.coverage.get(name) for name in ("initial_state", "parameter_order", "parameters")}:
            report.cover("gradients", unchecked("the ranks train different models"))
            return
        if self._has_other_samples(common):
            VirtualRanks(self.record, self.others.virtual_ranks).judge(common, report)
            return
        self._compare(common, report)
        if report.coverage["gradients"] == AGREES and self.others.merged is not None and self.others.apart is not None:
            Windows(self.record, self.others.merged, self.others.apart).judge(common, self.whole, report)

    def _compare(self, common: list[Event], report: Report) -> None:
        apart = {event["event"]: self._apart(event) for event in common}
        worst = max(one.worst for one in apart.values())
        if (chance := self._chance()) is not None and worst > numerics.limit(0.0, self._recorded(common[0])):
            report.cover("gradients", unchecked(chance))
            return
        if worst <= numerics.limit(0.0, self._recorded(common[0])):
            margin = f"worst error {worst:.1e} of a tensor's norm, {plural(len(common), 'step')}"
            report.cover("gradients", DECLARED if self._has_norms() else AGREES, margin)
            return
        again = self.others.permuted()
        for event in common:
            floor = self._floor(again, event)
            limit = numerics.limit(floor, self._recorded(event))
            if numerics.is_too_coarse(floor, self._recorded(event)) and apart[event["event"]].worst < 1:
                why = f"rounding alone is {floor:.0e} of a gradient at this precision"
                report.cover("gradients", unchecked(why))
                return
            if apart[event["event"]].worst > limit:
                self._explain(event, apart[event["event"]], limit, report)
                return
        margin = f"worst error {worst:.1e} of a tensor's norm, rounding explains {limit:.1e}"
        report.cover("gradients", DECLARED if self._has_norms() else AGREES, margin)

    def _has_other_samples(self, common: list[Event]) -> bool:
        """Whether one process, which cuts the data by itself, trains on other samples than the ranks together."""
        windows = {event["window"] for event in common}
        alone = _samples(self.whole.record.ranks, windows)
        return bool(alone) and alone != _samples(self.record.ranks, windows)

    def _out_of_step(self) -> Iterator[Finding]:
        """Whether the script alone takes its steps at the same batches."""
        events = self.whole.record.ranks[0].of("out_of_step") if self.whole.record.ranks else []
        skips = any(event["skipped"] for event in self.record.ranks[0].of("scaler"))
        if events and not skips:  # a scaler finds its scale, and one process another
            window = min(events[0]["window"], events[0]["own"])
            steps = [step for step in self.record.ranks[0].steps if step["window"] >= window]
            does = (
                "takes a step that the ranks do not take" if events[0]["own"] > window else "skips a step of the ranks"
            )
            yield Finding(
                code="steps-differ",
                property="control",
                step=window,
                where=steps[0]["where"] if steps else None,
                cause=f"given all samples of step {window}, one process {does}",
                fix="let the decision to skip depend on what all ranks know: reduce it",
            )

    def _rates(self) -> Iterator[Finding]:
        """Whether one process has the ranks' learning rate; N times as much, for N times the batch, is declared."""
        size, often = self.record.size, False
        alone = Rates(self.whole.record.ranks[0] if self.whole.record.ranks else Rank(0, []))
        scheduled = schedule_steps(self.record.ranks[0])
        for event in self.record.ranks[0].steps:
            mine, theirs = event["rates"], alone.at(event["event"], scheduled[event["event"]], size)
            often |= alone.scheduled.get(event["event"], 0) * size == scheduled[event["event"]] > 0
            ratios = [one / other for one, other in zip(mine, theirs, strict=False) if other]
            wrong = next((ratio for ratio in ratios if abs(ratio - 1) > _SAME_RATE), None)
            if wrong is None:
                continue
            declared = any(abs(wrong / rule - 1) < _SAME_RATE for rule in (size, size**0.5))
            made = self.record.ranks[0].of("optimizer")
            yield Finding(
                code="learning-rate-differs",
                severity="note" if declared else "error",
                property="control",
                step=event["event"],
                factor=round(wrong, 6),
                where=made[0]["where"] if made else None,
                cause=f"{size} ranks step with {wrong:.4g} times the rate of one process: "
                + ("scaled with the number of ranks" if declared else "no rule for a batch so many times as large"),
                fix=None if declared else "scale the rate once, by the factor by which the whole batch grows",
            )
            return
        if often:
            yield counted_in_parts(self.record)

    def _chance(self) -> str | None:
        """Why the ranks' random numbers could not be handed to one process."""
        events = self.whole.record.ranks[0].of("chance")
        if not events:
            return None
        _, where, _ = events[0]["place"].split("|")
        return f"each rank draws by itself at {where} ({events[0]['name']}), and one process cannot draw the same"

    def _why(self) -> str:
        if self.whole.unjoinable is not None:
            return f"the ranks' batches cannot be joined to one: {self.whole.unjoinable}"
        if self.whole.ended.hung:
            return "the script alone hangs"
        failure = self.whole.ended.failure
        if failure is not None:
            return f"the script cannot run alone: {failure['exception']}: {failure['message'][:200]}"
        return "the script alone took other steps"

    def _recorded(self, event: Event) -> Any:
        return self.record.gradients(event)

    def _apart(self, event: Event) -> numerics.Distance:
        return numerics.distance(self._recorded(event), self.whole.gradients(event["event"]))

    def _floor(self, again: Run, event: Event) -> float:
        """How far rounding alone takes the gradients of a step apart."""
        number = event["event"]
        if number not in again.steps:
            return 0.0
        return numerics.distance(again.gradients(number), self.whole.gradients(number)).worst

    def _has_norms(self) -> bool:
        return any(event["norms"] for event in self.record.ranks[0].of("wrap"))

    def _explain(self, event: Event, apart: numerics.Distance, limit: float, report: Report) -> None:
        hooks = self.record.ranks[0].of("hook")
        if hooks:
            report.add([self._hooked(event, apart, hooks[0])])
            report.cover("gradients", DECLARED)
            return
        found = next(self._explanations(event, apart, limit), None) or self._unexplained(event, apart)
        report.add([found])
        if found.severity == "note":
            report.cover("gradients", DECLARED)

    def _explanations(self, event: Event, apart: numerics.Distance, limit: float) -> Iterator[Finding]:
        number = event["event"]
        recorded, alone = self._recorded(event), self.whole.gradients(number)
        one, whole = numerics.flat(recorded, alone), numerics.flat(alone, recorded)
        scaled = numerics.fit(one, [whole])
        if scaled.left < max(limit, _EXPLAINED * apart.whole) and abs(scaled.factors[0] - 1) > _SAME_RATE:
            yield self._scaled(event, scaled.factors[0])
            return
        runs = self.others.of_ranks()
        if not all(number in run.steps for run in runs):
            return
        parts = [numerics.flat(run.gradients(number), alone) for run in runs]
        mean = sum(parts) / len(parts)
        as_mean = float((one - mean).norm() / one.norm().clamp_min(1e-300))
        if as_mean > max(limit, _EXPLAINED * apart.whole):
            yield from self._of_some(event, one, parts, limit)
            return
        weights = numerics.fit(whole, parts)
        if all(abs(weight * len(parts) - 1) < _SAME_RATE for weight in weights.factors):
            return
        if weights.left < max(limit, _EXPLAINED * apart.whole):
            yield self._mean_of_means(event, weights.factors)
        else:
            yield self._composed(event)

    def _of_some(self, event: Event, one: Any, parts: list[Any], limit: float) -> Iterator[Finding]:
        weights = numerics.fit(one, parts)
        if weights.left < max(limit, 1e-4):
            shares = ", ".join(f"{factor:.3g}" for factor in weights.factors)
            yield Finding(
                code="gradient-differs",
                property="gradients",
                step=event["event"],
                where=self._backward(event),
                cause=f"at step {event['event']} the ranks' gradients count {shares} times, where a mean counts each "
                f"{1 / len(parts):.3g} times",
                fix="weigh every rank by its share of the step's samples",
            )

    def _scaled(self, event: Event, factor: float) -> Finding:
        size, micro = self.record.size, max(event["micro"], 1)
        cause, fix = _meaning(factor, size, micro)
        return Finding(
            code="gradient-scale",
            property="gradients",
            step=event["event"],
            factor=round(factor, 6),
            where=self._backward(event),
            cause=f"at step {event['event']} every gradient is {factor:.4f} times that of one process: {cause}",
            fix=fix,
        )

    def _mean_of_means(self, event: Event, weights: tuple[float, ...]) -> Finding:
        shares = ", ".join(f"{weight:.3f}" for weight in weights)
        return Finding(
            code="gradient-differs",
            property="gradients",
            step=event["event"],
            where=self._backward(event),
            cause=f"at step {event['event']} the gradient is the mean of the ranks' means, though their parts are not "
            f"alike: one process weighs them {shares}, the ranks {1 / len(weights):.3f} each",
            fix="divide each rank's sum by the number of items of all ranks, times the world size: "
            "F.cross_entropy(…, reduction='sum') * world_size / all_items; samestep does it in batches.mean(losses)",
        )

    def _composed(self, event: Event) -> Finding:
        return Finding(
            code="gradient-differs",
            severity="note",
            property="gradients",
            step=event["event"],
            where=self._backward(event),
            cause="the loss of the whole batch is no mean over its parts (it compares samples with each other, say), "
            "so N ranks and one process train on different losses; the ranks' average is right for what they compute",
            fix="gather what is compared from all ranks, with gradients, if the whole batch is meant",
        )

    def _hooked(self, event: Event, apart: numerics.Distance, hook: Event) -> Finding:
        """What a communication hook loses is declared, unless it loses the gradient itself."""
        lost = apart.whole > _MOST_LOST
        return Finding(
            code="gradient-differs",
            severity="error" if lost else "note",
            property="gradients",
            step=event["event"],
            where=hook["where"],
            cause=f"{hook['name']} changes the gradients by {apart.whole:.1e} of their norm at step {event['event']}"
            + (": more than rounding them could; they are too small, or too large, for its type" if lost else ""),
            fix="scale the loss so that gradients fit the type, or reduce them as they are" if lost else None,
        )

    def _unexplained(self, event: Event, apart: numerics.Distance) -> Finding:
        name = list(event["gradients"])[apart.tensor]
        buffer = self._differing_buffer(event["window"])
        why = f"; the buffer {buffer} is another on each rank, and nobody keeps it alike" if buffer else ""
        return Finding(
            code="gradient-differs",
            property="gradients",
            step=event["event"],
            tensor=buffer or name,
            where=self._backward(event),
            cause=f"at step {event['event']} the gradients are not those of one process, most of all that of {name}: "
            f"an error of {apart.worst:.1e} of its norm{why}",
            fix="reduce over all ranks what the buffer is updated from" if buffer else None,
        )

    def _differing_buffer(self, window: int) -> str | None:
        """A buffer of a module that no wrapper looks after, a loss's running state, which differs between ranks."""
        told = [one["others"] for rank in self.record.ranks for one in rank.of("window") if one["number"] == window]
        return next((name for name in told[0] for one in told if one.get(name) != told[0][name]), None)

    def _backward(self, event: Event) -> str:
        window = self.record.ranks[0].by_window.get(event["window"], [])
        where: str = next((one["where"] for one in reversed(window) if one["kind"] == "backward"), event["where"])
        return where


def _samples(ranks: list[Rank], windows: set[int]) -> set[tuple[int, str]]:
    """What the models have seen in some windows; a wrapper may see it once more."""
    inputs = [event for rank in ranks for event in rank.of("input") if event["window"] in windows]
    return {(event["window"], row) for event in inputs for row in event["rows"]}


def _meaning(factor: float, size: int, micro: int) -> tuple[str, str]:
    def near(value: float) -> bool:
        return abs(factor / value - 1) < 0.01

    if near(1 / size):
        return (
            f"1/{size}, the number of ranks: a sum is averaged (DistributedDataParallel divides by it)",
            "(loss * world_size).backward(), or a mean over the items of all ranks",
        )
    if near(size):
        return f"{size}, the number of ranks: the loss, or the gradient, is multiplied by it", "leave the factor out"
    if micro > 1 and near(1 / micro):
        return f"1/{micro}, the number of micro-batches: it is divided by it twice", "divide once"
    if micro > 1 and near(micro):
        return f"{micro}, the number of micro-batches: it is not divided by it", f"(loss / {micro}).backward()"
    return "a constant factor", "look for what multiplies or divides on several ranks only"
