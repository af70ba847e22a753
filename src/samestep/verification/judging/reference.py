"""Whether the gradients of N ranks are those of one process, at the steps whose values were kept."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from samestep.verification import numerics
from samestep.verification.findings import AGREES, DECLARED, REFUTED, Finding, unchecked
from samestep.verification.journal import Event
from samestep.verification.judging import repeated
from samestep.verification.judging.explanations import Explanations
from samestep.verification.judging.others import Others
from samestep.verification.judging.rates import Rates, counted_in_parts, schedule_steps
from samestep.verification.judging.record import Rank, Record
from samestep.verification.judging.samples import are_loaded, loads_for_all
from samestep.verification.judging.single import Run
from samestep.verification.judging.skipped import skipper
from samestep.verification.judging.states import averaged_behind
from samestep.verification.judging.virtual_ranks import VirtualRanks, calls_in
from samestep.verification.judging.windows import Windows
from samestep.verification.judging.words import plural
from samestep.verification.report import Report

__all__: list[str] = []

_RATE_FIX = "scale the rate once, as the whole batch grows; let a schedule be as long as that of one process"
_SAME_RATE = 1e-3  # of a rate


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
        apart = list(self._out_of_step())
        report.add(apart)
        report.add(self._rates())
        mine = [event for event in self.record.ranks[0].steps[: self.record.steps] if event["kept"] is not None]
        common = [event for event in mine if event["event"] in self.whole.steps]
        common = [event for event in common if not apart or event["window"] < (apart[0].step or 0)]
        common = [event for event in common if event["window"] not in self._astray]
        unknown = {event["event"]: self.record.compressed(event).why_not(event) for event in common}
        common = [event for event in common if unknown[event["event"]] is None]
        if not common:
            report.cover("gradients", unchecked(next(filter(None, unknown.values()), None) or self._why()))
            return
        if report.coverage.get("gradients") == REFUTED:
            return
        if REFUTED in {report.coverage.get(name) for name in ("initial_state", "parameter_order", "parameters")}:
            report.cover("gradients", unchecked("the ranks train different models"))
            return
        if (own := averaged_behind(self.record)) is not None:
            why = f"at step {own} each rank steps with a gradient of its own, and the parameters are averaged behind it"
            report.cover("gradients", unchecked(why))
            return
        if not self.record.is_alike:
            report.cover("gradients", unchecked("each rank's optimizer holds other parameters (a sharded optimizer)"))
            return
        if self._has_other_samples(common) or self._draws_others():
            self._compare_parts(common, report)
            return
        self._compare(common, report)
        self._judge_repeated(common, report)
        if report.coverage["gradients"] == AGREES and self.others.merged is not None and self.others.apart is not None:
            Windows(self.record, self.others.merged, self.others.apart).judge(common, self.whole, report)

    def _compare_parts(self, common: list[Event], report: Report) -> None:
        drawing = all(rank.of("draw") for rank in self.record.ranks)
        with_draws = self.others.with_draws if drawing and self._calls_as_often(common) else None
        VirtualRanks(self.record, self.others.virtual_ranks, self.others.again, with_draws).judge(common, report)
        self._judge_repeated(common, report)

    def _judge_repeated(self, common: list[Event], report: Report) -> None:
        if report.coverage.get("gradients") in {AGREES, DECLARED}:
            found = repeated.finding(self.record, common, self.others.virtual_ranks)
            report.add([] if found is None else [found])

    def _draws_others(self) -> bool:
        """Whether one process cannot draw what the ranks have drawn, where no DataLoader tells its samples."""
        return self._chance() is not None and not are_loaded(self.record)

    def _calls_as_often(self, common: list[Event]) -> bool:
        """Whether the models are called as often in a step of one process as in one of a rank's."""
        ranks = [*self.whole.record.ranks[:1], self.record.ranks[0]]
        calls = [[len(calls_in(rank, step["window"])) for step in common] for rank in ranks]
        return calls[0] == calls[-1]

    def _compare(self, common: list[Event], report: Report) -> None:
        apart = {event["event"]: self._apart(event) for event in common}
        worst = max(one.worst for one in apart.values())
        if (chance := self._chance()) is not None and worst > numerics.limit(0.0, self._recorded(common[0])):
            report.cover("gradients", unchecked(chance))
            return
        broken = next((event for event in common if math.isinf(apart[event["event"]].worst)), None)
        if broken is not None:
            if before := common[: common.index(broken)]:
                self._compare(before, report)
            self._judge_broken(broken, apart[broken["event"]], report)
            return
        if worst <= numerics.limit(0.0, self._recorded(common[0])):
            margin = f"worst error {worst:.1e} of a tensor's norm, {plural(len(common), 'step')}"
            report.cover("gradients", DECLARED if self._has_norms() else AGREES, margin)
            return
        again = self.others.permuted()
        judged: list[tuple[float, float]] = []  # the error of each step, and how much of it rounding explains
        for event in common:
            error, floor = apart[event["event"]].worst, self._floor(again, event)
            limit = numerics.limit(floor, self._recorded(event))
            is_coarse = numerics.is_too_coarse(floor, self._recorded(event)) and error <= max(1.0, limit)
            exact = self._in_float64(event) if is_coarse or error > limit else None
            if (
                exact is not None
                and numerics.is_rounding(error, exact)
                and (is_coarse or error <= numerics.MOST_ROUNDING)
            ):
                told = f"an error of {error:.1e} is rounding: in float64 it is {exact:.0e}"
                report.remarks.append(f"at step {event['event']} {told}")
                judged.append((error, error))
                continue
            if is_coarse and exact is None:
                why = f"rounding alone is {floor:.0e} of a gradient at this precision"
                continue  # one that has converged says nothing
            if error > limit or is_coarse:
                self._explain(event, apart[event["event"]], limit, report, settled=event is not common[0])
                return
            judged.append((error, limit))
        if not judged:
            report.cover("gradients", unchecked(why))
            return
        unmeasured = [event for event in common if event["event"] not in again.steps]
        if any(apart[event["event"]].worst > numerics.limit(0.0, self._recorded(event)) for event in unmeasured):
            report.cover("gradients", unchecked(f"rounding could not be measured: {_why_unmeasured(again)}"))
            return
        worst, limit = max(judged, key=lambda one: one[0] / one[1])
        margin = f"worst error {worst:.1e} of a tensor's norm, rounding explains {limit:.1e}"
        report.cover("gradients", DECLARED if self._has_norms() else AGREES, margin)

    def _judge_broken(self, event: Event, apart: numerics.Distance, report: Report) -> None:
        """Of a step at which some gradient is not finite: NaN on both sides is one training, on one side it is not."""
        if report.coverage.get("gradients") == REFUTED:
            return
        ours = numerics.are_finite(self._recorded(event))
        if ours != numerics.are_finite(self.whole.gradients(event["event"])):
            found = Explanations(self.record, self.whole, self.others).not_finite(
                event, apart.tensor, on_ranks=not ours
            )
            report.add([found])
            return
        why = f"from step {event['event']} on gradients are not finite, on the ranks and in one process alike"
        if "gradients" in report.coverage:
            report.remarks.append(f"{why}: steps behind it were not compared")
        else:
            report.cover("gradients", unchecked(why))

    def _has_other_samples(self, common: list[Event]) -> bool:
        """Whether one process, which cuts the data by itself, trains on other samples than the ranks together."""
        windows = {event["window"] for event in common}
        alone = _samples(self.whole.record.ranks, windows)
        return bool(alone) and alone != _samples(self.record.ranks, windows)

    @cached_property
    def _astray(self) -> set[int]:
        """The windows that the script alone ends at other batches: a scaler finds its scale, one process another."""
        told = [(event["window"], event["own"]) for event in self._told_out_of_step()] if self._skips else []
        return {window for ends in told for window in range(min(ends), max(ends) + 1)}

    @property
    def _skips(self) -> bool:
        """Whether a scaler leaves out steps of the ranks."""
        return any(event["skipped"] for event in self.record.ranks[0].of("scaler"))

    def _told_out_of_step(self) -> list[Event]:
        return self.whole.record.ranks[0].of("out_of_step") if self.whole.record.ranks else []

    def _out_of_step(self) -> Iterator[Finding]:
        """Whether the script alone takes its steps at the same batches."""
        events = self._told_out_of_step()
        if events and not self._skips:
            window = min(events[0]["window"], events[0]["own"])
            steps = [step for step in self.record.ranks[0].steps if step["window"] >= window]
            does = (
                "takes a step that the ranks do not take" if events[0]["own"] > window else "skips a step of the ranks"
            )
            rank = skipper(self.record)
            who = "" if rank is None else f"; rank {rank} leaves out a batch that the others train on"
            yield Finding(
                code="steps-differ",
                property="control",
                rank=rank,
                step=window,
                where=steps[0]["where"] if steps else None,
                cause=f"given all samples of step {window}, one process {does}{who}",
                fix="let the decision to skip depend on what all ranks know: reduce it",
            )

    def _rates(self) -> Iterator[Finding]:
        """Whether one process has the ranks' learning rates; N times as much, for N times the batch, is declared."""
        size, often, noted = self.record.size, False, False
        alone = Rates(self.whole.record.ranks[0] if self.whole.record.ranks else Rank(0, []))
        scheduled = schedule_steps(self.record.ranks[0])
        for event in self.record.ranks[0].steps:
            if self._astray and event["window"] >= min(self._astray):
                break  # the schedule may go by the steps that are taken
            theirs = alone.at(event["event"], scheduled[event["event"]], size)
            often |= alone.scheduled.get(event["event"], 0) * size == scheduled[event["event"]] > 0
            apart = [pair for pair in zip(event["rates"], theirs, strict=False) if not _is_rate(*pair, 1.0)]
            wrong = next((pair for pair in apart if not _is_rate(*pair, size) and not _is_rate(*pair, size**0.5)), None)
            if wrong is not None:
                yield self._other_rate(event, *wrong, declared=False)
                return
            if apart and not noted:
                yield self._other_rate(event, *apart[0], declared=True)
                noted = True
        if often and not noted:
            yield counted_in_parts(self.record)

    def _other_rate(self, event: Event, mine: float, theirs: float, *, declared: bool) -> Finding:
        size, times = self.record.size, mine / theirs if theirs else None
        made = self.record.ranks[0].of("optimizer")
        moved = [one for one in self.record.ranks[0].of("scheduler") if one.get("event", 0) <= event["event"]]
        why = "scaled with the number of ranks"
        if not declared:
            why = "which no rule makes of it" if times is None else f"{times:.4g} times, which is no rule for {size}"
        return Finding(
            code="learning-rate-differs",
            severity="note" if declared else "error",
            property="control",
            step=event["event"],
            factor=None if times is None else round(times, 6),
            where=moved[-1]["where"] if moved and event["event"] else made[0]["where"] if made else None,
            cause=f"at step {event['event']} {size} ranks step with the rate {mine:.4g}, one process with "
            f"{theirs:.4g}: {why}",
            fix=None if declared else _RATE_FIX,
        )

    def _chance(self) -> str | None:
        """Why the ranks' random numbers could not be handed to one process."""
        events = self.whole.record.ranks[0].of("chance")
        if not events:
            return None
        where = events[0]["place"].partition("|")[2].rpartition("|")[0]  # a path may have one too
        return f"each rank draws by itself at {where} ({events[0]['name']}), and one process cannot draw the same"

    def _why(self) -> str:
        if self.whole.unjoinable is not None:
            return f"the ranks' batches cannot be joined to one: {self.whole.unjoinable}"
        if self.whole.ended.hung:
            return "the script alone hangs"
        failure = self.whole.ended.failure
        if failure is not None:
            return f"the script cannot run alone: {failure['exception']}: {failure['message'][:200]}"
        if self._astray:
            return "a scaler leaves out other steps in one process than on the ranks"
        return "the script alone took other steps"

    def _recorded(self, event: Event) -> Any:
        return self.record.gradients(event)

    def _apart(self, event: Event) -> numerics.Distance:
        return numerics.distance(self._recorded(event), self.whole.gradients(event["event"]))

    def _floor(self, again: Run, event: Event) -> float:
        """How far rounding alone takes the gradients of a step apart; as far as it may, where nobody has measured."""
        number = event["event"]
        if number not in again.steps:
            return numerics.COARSEST
        return numerics.distance(again.gradients(number), self.whole.gradients(number)).worst

    def _in_float64(self, event: Event) -> float | None:
        """Returns the error of the ranks' step in float64; None where none ran, or rounding hides it too."""
        if self._runs_in_float64 is None:
            return None
        record, alone, again = self._runs_in_float64
        number = event["event"]
        steps = [step for rank in record.ranks[:1] for step in rank.steps if step["event"] == number]
        if not steps or steps[0]["kept"] is None or number not in alone.steps or number not in again.steps:
            return None
        ours = record.gradients(steps[0])
        floor = numerics.distance(again.gradients(number), alone.gradients(number)).worst
        if numerics.is_too_coarse(floor, ours):  # one that has converged says nothing here either
            return None
        return numerics.distance(ours, alone.gradients(number)).worst

    @cached_property
    def _runs_in_float64(self) -> tuple[Record, Run, Run] | None:
        return None if self.others.in_float64 is None else self.others.in_float64()

    def _has_norms(self) -> bool:
        return any(event["norms"] for event in self.record.ranks[0].of("wrap"))

    def _explain(self, event: Event, apart: numerics.Distance, limit: float, report: Report, *, settled: bool) -> None:
        found = Explanations(self.record, self.whole, self.others).of(event, apart, limit, settled=settled)
        report.add([found])
        if found.severity == "note":
            report.cover("gradients", DECLARED)


def _is_rate(mine: float, theirs: float, times: float) -> bool:
    """Whether a rate is so many times another, which may be 0."""
    return abs(mine - times * theirs) <= _SAME_RATE * abs(times * theirs)


def _why_unmeasured(again: Run) -> str:
    failure = again.ended.failure
    told = "it took other steps" if failure is None else f"{failure['exception']}: {failure['message'][:200]}"
    return f"alone, with its samples in another order, {'no rank makes progress' if again.ended.hung else told}"


def _samples(ranks: list[Rank], windows: set[int]) -> set[tuple[int, str]]:
    """What the models have seen in some windows; a wrapper may see it once more."""
    inputs = [event for rank in ranks for event in rank.of("input") if event["window"] in windows]
    return {(event["window"], row) for event in inputs for row in event["rows"]}
