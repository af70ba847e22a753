"""Whether the gradients of N ranks are those of one process, at the steps whose values were kept."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from samestep.text import plural
from samestep.verification import numerics
from samestep.verification.findings import AGREES, DECLARED, REFUTED, unchecked
from samestep.verification.journal import Event
from samestep.verification.judging import average, by_hand, own_data, own_pace, unloaded, windows
from samestep.verification.judging import local_steps as local
from samestep.verification.judging.explanations import Explanations
from samestep.verification.judging.in_step import InStep, chance_of
from samestep.verification.judging.others import Others
from samestep.verification.judging.passes import are_loaded, loads_for_all
from samestep.verification.judging.rates import Rates
from samestep.verification.judging.record import BY_THEMSELVES, Record, Run, model_inputs, place_of_draw
from samestep.verification.judging.states import averaged_behind, local_steps
from samestep.verification.report import Report, is_open

_SHARED = (
    "the ranks hold parts of one model and get different samples, as in sequence parallelism: which of them one "
    "process would get is not known"
)
_MOST_OF_HALF = 20.0  # times as far apart as rounding to 16 bits explains; farther is a mistake
_FEWEST = 8  # numbers in a gradient that is no multiple of another one by chance


@dataclass
class _Errors:
    """The errors of the gradients of a step, by their names."""

    judged: dict[str, tuple[float, float]] = field(default_factory=dict)  # error, and how much of it rounding explains
    wrong: dict[str, float] = field(default_factory=dict)  # errors that rounding does not explain
    hidden: dict[str, float] = field(default_factory=dict)  # floors of those that rounding hides
    limits: dict[str, float] = field(default_factory=dict)  # how large errors may be
    remarks: list[str] = field(default_factory=list)  # what was found to be rounding


def is_nearer(record: Record, run: Run, other: Run) -> bool:
    """Whether the gradients of a run are nearer to the ranks' than another's, at a step of both.

    It need not be the first: what is drawn before it is known on the ranks alone.
    """
    common = [event for event in record.kept_steps if event["event"] in run.steps.keys() & other.steps.keys()]
    one, two = (
        min(
            (numerics.distance(record.gradients(event), each.gradients(event["event"])).whole for event in common),
            default=math.inf,
        )
        for each in (run, other)
    )
    return one < two


@dataclass
class Comparison:
    """Compares the ranks with the script alone; `has_samples` says that it is known to have their samples."""

    record: Record
    whole: Run
    others: Others
    has_samples: bool = False

    def judge(self, report: Report) -> None:
        loader = loads_for_all(self.record) if self.whole.is_out_of_step else None
        if loader is not None:
            why = (
                f"rank {loader} loads for all ranks and sends it on, several batches at once, and one process does not"
            )
            report.cover("gradients", unchecked(why))
            return
        if self.record.by_themselves:
            report.cover("gradients", unchecked(BY_THEMSELVES))
            return
        report.add(self._in_step.findings())
        if (unknown := self._in_step.unknown) is not None:
            report.cover("control", unchecked(unknown))
        until = min(self._in_step.astray, default=None)
        rates = Rates(self.record, self.whole, self.others.own_lengths, self.others.own_pace, until)
        rates_apart = list(rates.findings())
        common = [event for event in self.record.kept_steps if self._is_common(event)]
        reasons = {event["event"]: self.record.compressed(event).why_not(event) for event in common}
        common = [event for event in common if reasons[event["event"]] is None]
        if rates_apart and common and Explanations(self.record, self.whole, self.others).is_made_up_for(common[0]):
            rates_apart = [replace(found, severity="note", fix=None) for found in rates_apart]
        report.add(rates_apart)
        if not common:
            report.cover("gradients", unchecked(next(filter(None, reasons.values()), None) or self._why()))
            return
        if report.coverage.get("gradients") == REFUTED:
            return
        if REFUTED in {report.coverage.get(name) for name in ("initial_state", "parameter_order", "parameters")}:
            report.cover("gradients", unchecked("the ranks train different models"))
            return
        if self.record.is_averaged_within:
            used = by_hand.as_used(self.record, self.whole, common, report)
            if used is not None:
                replace(self, record=used).judge_known(common, report)
            self._compare_own_pace(common, report)
            return
        if (own := averaged_behind(self.record)) is not None:
            why = f"at step {own} each rank steps with a gradient of its own, and the parameters are averaged behind it"
            report.cover("gradients", unchecked(why))
            return
        if (declared := local_steps(self.record)) is not None and self.others.of_group is not None:
            local.judge(self.record, declared, common, self._compare_group, report)
            return
        self.judge_known(common, report)

    def _of_ranks(self) -> list[Run]:
        """What one process makes of each rank's samples, with its gradients before clipping where that can be asked."""
        return (self.others.unclipped or self.others.of_ranks)()

    def _is_common(self, event: Event) -> bool:
        """Whether one process has taken a step of the ranks, with the same optimizer and at the same batches."""
        alone = self.whole.steps.get(event["event"])
        in_step = event["window"] < self._in_step.until and event["window"] not in self._in_step.astray
        return alone is not None and alone["optimizer"] == event["optimizer"] and in_step

    def judge_known(self, common: list[Event], report: Report) -> None:
        """Compares steps for which the ranks' gradients are known."""
        if self.whole.apart is not None:
            why = f"the ranks' batches cannot be joined to one: {self.whole.apart}"
            average.judge_by_rank(self.record, self._of_ranks(), common, report, why)
            return
        if self._share_no_samples(common):
            report.cover("gradients", unchecked(_SHARED))
            return
        others = not self.has_samples and (self.has_other_samples(common) or self.draws_others())
        if others and (redrawn := self._redrawn(common)) is not None:
            redrawn.judge_known(common, report)
            return
        if others and not self._are_those_of_one_process(common):
            if not self._compare_in_turn(common, report):
                average.judge(self.record, common, report, self.others.own_pace)
                self._compare_own_pace(common, report)
                self._judge_repeated(common, report)
            return
        self._compare(common, report, are_multiples=others)
        self._judge_repeated(common, report)
        merged, apart = self.others.merged, self.others.apart
        if report.coverage["gradients"] == AGREES and merged is not None and apart is not None:
            windows.judge(self.record, common, self.whole, merged, apart, report)

    def _redrawn(self, common: list[Event]) -> Comparison | None:
        """Returns a comparison with a process that gets the ranks' draws in another way, if that has their samples."""
        drawing = all(any(one["kept"] is not None for one in rank.of("draw")) for rank in self.record.data.ranks)
        if not drawing or are_loaded(self.record):
            return None
        ranks = model_inputs(self.record.data.ranks, _windows(common))
        if self.others.own_draws is not None and self.draws_for_all(_windows(common)):
            found = self._with(self.others.own_draws())
            rows = found.rows_of(common)
            if rows == ranks or (rows and rows.isdisjoint(ranks)):  # samples that lie side by side along another dim
                return replace(found, has_samples=True)
        for run in self.others.redrawn:
            found = self._with(run())
            if found.rows_of(common) and not found.has_other_samples(common) and not found.draws_others():
                return found
        return None

    def _with(self, run: Run) -> Comparison:
        return replace(self, whole=run, others=replace(self.others, own_draws=None, redrawn=()))

    def rows_of(self, common: list[Event]) -> set[tuple[int, str]]:
        """What the models of one process get in these steps, if it takes all of them."""
        has_all = all(event["event"] in self.whole.steps for event in common)
        return model_inputs(self.whole.record.ranks, _windows(common)) if has_all else set()

    def _are_those_of_one_process(self, common: list[Event]) -> bool:
        """Whether all gradients are multiples of one process's, whatever its models saw: it pads otherwise, say."""
        is_known = False
        for event in common:
            known = average.vectors(self.record.gradients(event), [self.whole.gradients(event["event"])])
            if known is None:
                continue
            if numerics.fit(*known).left > self._limit(event):
                return False
            is_known = is_known or known[0].numel() >= _FEWEST
        return is_known

    def _compare_group(self, ranks: list[int], steps: list[Event], report: Report) -> None:
        """Compares some ranks, which have averaged their gradients, with the script alone on their samples."""
        assert self.others.of_group is not None
        whole, others = self.others.of_group(ranks)
        group = Comparison(self.record.of_ranks(ranks), whole, others)
        common = [step for step in steps if step["event"] in whole.steps]
        if not common:
            report.cover("gradients", unchecked(group._why()))
        elif group.has_other_samples(common):
            report.cover("gradients", unchecked("alone, the script trains on other samples than they do"))
        else:
            group._compare(common, report)

    def _compare_in_turn(self, common: list[Event], report: Report) -> bool:
        """Compares them with one process that takes a step for each rank's; returns whether that is conclusive."""
        stepping = {event["optimizer"] for event in self.record.ranks[0].steps}
        if self.others.in_turn is None or self.record.is_by_hand or are_loaded(self.record) or len(stepping) > 1:
            return False
        is_conclusive = average.judge_in_turn(self.record, self.others.in_turn(), common, report)
        if is_conclusive:
            self._judge_repeated(common, report)
        return is_conclusive

    def _compare_own_pace(self, common: list[Event], report: Report) -> None:
        if self.others.own_pace is not None and is_open(report, "gradients"):
            own_pace.judge(self.record, self.others.own_pace(), common, report)

    def _judge_repeated(self, common: list[Event], report: Report) -> None:
        if report.coverage.get("gradients") in {AGREES, DECLARED}:
            found = unloaded.same_on_two_ranks(self.record, self.whole, common)
            report.add([] if found is None else [found])

    def draws_others(self) -> bool:
        """Whether one process cannot draw what the ranks have drawn, where no DataLoader tells its samples."""
        return chance_of(self.whole) is not None and not are_loaded(self.record)

    def _compare(self, common: list[Event], report: Report, *, are_multiples: bool = False) -> None:
        pairs = [(self.record.gradients(event), self.whole.gradients(event["event"])) for event in common]
        if all(numerics.are_zero(ours) and numerics.are_zero(alone) for ours, alone in pairs):
            report.cover("gradients", unchecked(average.EVERY_ZERO))
            self._compare_own_pace(common, report)
            return
        apart = {event["event"]: numerics.distance(*pair) for event, pair in zip(common, pairs, strict=True)}
        worst = max(one.worst for one in apart.values())
        chance = None if are_multiples else chance_of(self.whole)
        if chance is not None and worst > self._limit(common[0]):
            average.judge_by_rank(self.record, self._of_ranks(), common, report, chance)
            return
        broken = next((event for event in common if math.isinf(apart[event["event"]].worst)), None)
        if broken is not None:
            if before := common[: common.index(broken)]:
                self._compare(before, report)
            self._judge_broken(broken, apart[broken["event"]], report)
            return
        if worst <= self._limit(common[0]):
            self._cover(f"worst error {worst:.1e} of a tensor's norm, {plural(len(common), 'step')}", report)
            return
        again = self.others.permuted()
        judged: list[tuple[float, float]] = []  # error of a tensor in a step, and how much of it rounding explains
        known: set[str] = set()
        hidden: dict[str, float] = {}
        for event in common:
            errors = self._errors(again, event, apart[event["event"]])
            report.remarks += errors.remarks
            if errors.wrong:
                tensor = max(errors.wrong, key=errors.wrong.__getitem__)
                found = replace(apart[event["event"]], tensor=tensor, worst=errors.wrong[tensor])
                explanations = Explanations(self.record, self.whole, self.others)
                explained = explanations.of(event, found, errors.limits[tensor], settled=event is not common[0])
                if explanations.has_no_cause and own_data.are_seeded_apart(self.record):
                    report.cover("gradients", unchecked(own_data.SEEDED_APART))
                    return
                report.add([explained])
                if explained.severity == "note":
                    report.cover("gradients", DECLARED)
                return
            judged += errors.judged.values()
            known |= errors.judged.keys()
            hidden |= errors.hidden
        if unknown := [name for name in hidden if name not in known]:
            why = f"rounding alone is {hidden[unknown[0]]:.0e} of a gradient at this precision: that of {unknown[0]}"
            report.cover("gradients", unchecked(why))
            return
        unmeasured = [event for event in common if event["event"] not in again.steps]
        if any(apart[event["event"]].worst > self._limit(event) for event in unmeasured):
            report.cover("gradients", unchecked(f"rounding could not be measured: {_why_unmeasured(again)}"))
            return
        worst, limit = max(judged, key=lambda one: one[0] / one[1])
        self._cover(f"worst error {worst:.1e} of a tensor's norm, rounding explains {limit:.1e}", report)

    def _errors(self, again: Run, event: Event, apart: numerics.Distance) -> _Errors:
        """Judges each gradient of a step by itself; in float64 too, where it is wrong or rounding hides it."""
        floors, recorded, found = self._floors(again, event), self.record.gradients(event), _Errors()
        for name, error in apart.errors.items():
            floor = floors(name)
            limit = found.limits[name] = self._limit(event, floor)
            is_half = error > limit and numerics.is_too_coarse(0.0, recorded, self._coarsest(event))
            is_hidden = (floor > numerics.COARSEST and error <= max(1.0, limit)) or (
                is_half and error <= _MOST_OF_HALF * limit
            )
            if not is_hidden and error <= limit:
                found.judged[name] = (error, limit)
                continue
            exact = (self._in_float64(event) or {}).get(name)
            most = math.inf if is_hidden else numerics.MOST_ROUNDING
            if exact is not None and error <= most and numerics.is_rounding(error, exact):
                found.judged[name] = (error, error)
                why = f"an error of {error:.1e} in the gradient of {name} is rounding: in float64 it is {exact:.0e}"
                found.remarks.append(f"at step {event['event']} {why}")
            elif exact is None and is_hidden:
                found.hidden[name] = floor
            else:
                found.wrong[name] = error
        return found

    def _judge_broken(self, event: Event, apart: numerics.Distance, report: Report) -> None:
        """Judges a step with a gradient that is not finite: NaN on one side alone is a difference."""
        if report.coverage.get("gradients") == REFUTED:
            return
        ours = numerics.are_finite(self.record.gradients(event))
        if ours != numerics.are_finite(self.whole.gradients(event["event"])):
            explanations = Explanations(self.record, self.whole, self.others)
            report.add([explanations.not_finite(event, apart.tensor, on_ranks=not ours)])
            return
        why = f"from step {event['event']} on gradients are not finite, on the ranks and in one process alike"
        if "gradients" in report.coverage:
            report.remarks.append(f"{why}: steps behind it were not compared")
        else:
            report.cover("gradients", unchecked(why))

    def has_other_samples(self, common: list[Event]) -> bool:
        """Whether one process, which cuts the data by itself, trains on other samples than the ranks together."""
        alone = model_inputs(self.whole.record.ranks, _windows(common))
        differ = bool(alone) and alone != model_inputs(self.record.data.ranks, _windows(common))
        return differ and not self._choose_alike(_windows(common))

    def _share_no_samples(self, common: list[Event]) -> bool:
        """Whether ranks that hold parts of one model get other samples than those that are taken to have them all."""
        of_all, known = (model_inputs(one.ranks, _windows(common)) for one in (self.record, self.record.data))
        return self.record.is_cut and not are_loaded(self.record) and of_all != known

    def _choose_alike(self, windows: set[int]) -> bool:
        """Whether equal random places, on all ranks and in one process, decide which samples are used in a step.

        Then they are the same ones, which ranks cut otherwise than by samples: sequences into stretches, say. Where
        each draws noise of its own, a rank's samples are another part of them.
        """
        drawn = [_drawn(rank.of("draw"), windows) for rank in self.record.data.ranks]
        chosen = [_drawn(rank.of("draw"), windows, chosen=True) for rank in self.record.data.ranks]
        alone = [_drawn(rank.of("own_draw"), windows, chosen=True) for rank in self.whole.record.ranks]
        are_equal = all(one == drawn[0] for one in drawn)
        return are_equal and len(chosen[0]) >= len(windows) and all(one == chosen[0] for one in [*chosen, *alone])

    def draws_for_all(self, windows: set[int]) -> bool:
        """Whether one process draws by itself, in some windows, the very numbers that the ranks draw together.

        So it is where each environment, or each sample, has a generator of its own.
        """
        ranks = [_by_line(rank.of("draw"), windows) for rank in self.record.data.ranks]
        alone = _by_line(self.whole.rank.of("own_draw"), windows)
        lines = {line for theirs in ranks for line in theirs}
        together = {line: sum((theirs[line] for theirs in ranks), Counter()) for line in lines}
        shared = {line for line in lines if all(theirs[line] == alone[line] for theirs in ranks)}
        return lines > shared and all(together[line] == alone[line] for line in lines - shared)

    @cached_property
    def _in_step(self) -> InStep:
        return InStep(self.record, self.whole)

    def _why(self) -> str:
        if self.whole.unjoinable is not None:
            return f"the ranks' batches cannot be joined to one: {self.whole.unjoinable}"
        if self.whole.ended.hung:
            return "the script alone hangs"
        failure = self.whole.ended.failure
        if failure is not None:
            return f"the script cannot run alone: {failure['exception']}: {failure['message'][:200]}"
        if self._in_step.astray:
            return "a scaler leaves out other steps in one process than on the ranks"
        return "the script alone took other steps"

    def _limit(self, event: Event, floor: float = 0.0) -> float:
        """How far the gradients of a step may be apart."""
        return numerics.limit(floor, self.record.gradients(event), self._coarsest(event))

    def _coarsest(self, event: Event) -> float:
        return max(float(event.get("unit", 0.0)), self.record.sent_in(event))

    def _floors(self, again: Run, event: Event) -> Callable[[str], float]:
        """How far rounding alone takes each gradient of a step apart; as far as it may, where that was not measured."""
        number = event["event"]
        if number not in again.steps:
            return lambda _: numerics.COARSEST
        floors = numerics.distance(again.gradients(number), self.whole.gradients(number)).errors
        return lambda name: floors.get(name, 0.0)

    def _in_float64(self, event: Event) -> Mapping[str, float] | None:
        """Returns the errors of the ranks' step in float64, of gradients that rounding does not hide there too."""
        if self.others.in_float64 is None:
            return None
        record, alone, again = self.others.in_float64()
        number = event["event"]
        steps = [step for rank in record.ranks[:1] for step in rank.steps if step["event"] == number]
        if not steps or steps[0]["kept"] is None or number not in alone.steps or number not in again.steps:
            return None
        ours, theirs = record.gradients(steps[0]), alone.gradients(number)
        if ours.keys() != theirs.keys():
            return None
        floors = numerics.distance(again.gradients(number), theirs).errors
        errors = numerics.distance(ours, theirs).errors
        return {
            name: error for name, error in errors.items() if not numerics.is_too_coarse(floors.get(name, 0.0), ours)
        }

    def _cover(self, margin: str, report: Report) -> None:
        has_norms = self.record.has_local_norms
        if has_norms:
            margin = f"with BatchNorm statistics of each rank's samples: {margin}"
        report.cover("gradients", DECLARED if has_norms else AGREES, margin)


def _windows(steps: list[Event]) -> set[int]:
    return {step["window"] for step in steps}


def _drawn(draws: list[Event], windows: set[int], *, chosen: bool = False) -> dict[str, str]:
    """Place -> digest of the numbers that were drawn in some windows; `chosen`: of the whole ones alone."""
    named = [one for one in draws if place_of_draw(one)[0] in windows and one["digest"] is not None]
    return {one["place"]: one["digest"] for one in named if one.get("whole") or not chosen}


def _by_line(draws: list[Event], windows: set[int]) -> defaultdict[tuple[int, str], Counter[str | None]]:
    """Window and line -> digests of what was drawn there, and how often each."""
    found: defaultdict[tuple[int, str], Counter[str | None]] = defaultdict(Counter)
    for one in draws:
        if place_of_draw(one)[0] in windows:
            found[place_of_draw(one)][one["digest"]] += 1
    return found


def _why_unmeasured(again: Run) -> str:
    failure = again.ended.failure
    why = "it took other steps" if failure is None else f"{failure['exception']}: {failure['message'][:200]}"
    return f"alone, with its samples in another order, {'no rank makes progress' if again.ended.hung else why}"
