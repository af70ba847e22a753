"""Whether one process steps with the ranks' learning rates.

A rate may be scaled with the number of ranks N: by N (Goyal et al., Accurate, Large Minibatch SGD, section 2) or √N
(Krizhevsky, One weird trick). What is not scaled, such as a floor, is as high as in one process; so at every step the
ranks' rate must lie between one process's and c times it, where c is the ratio at the ranks' highest rate.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from samestep.text import plural
from samestep.verification.findings import AGREES, DECLARED, Finding, Severity
from samestep.verification.journal import Event
from samestep.verification.judging.passes import passes
from samestep.verification.judging.placement import Place
from samestep.verification.judging.record import Rank, Record, Run, calls_in, of_optimizer
from samestep.verification.report import Report

_SAME = 1e-3  # of a rate
_AS_FAR = 0.9  # of the samples that the ranks have used: one process may leave out an incomplete batch more often
_SCALED = "scaled with the number of ranks"
_FIX_SCALED = "leave the rate as it is: it is scaled where the batch of all ranks grows with their number"
_FIX = "scale the rate once, as the whole batch grows; let a schedule be as long as that of one process"
_FIX_OFTEN = (
    "move the schedule on once for each step of the optimizer, or count its length in batches of all ranks: "
    "len(loader) before the loader is prepared"
)


@dataclass(frozen=True)
class _Pair:
    """The rate of one parameter group, of the ranks and of one process; it is compared where it `counts`."""

    event: Event
    group: int | str  # or a parameter, where each rank's optimizer holds others
    mine: float
    theirs: float
    counts: bool = True

    def is_between(self, most: float) -> bool:
        """Whether the ranks have the rate of one process, or up to `most` times as much."""
        return self.theirs * (1 - _SAME) <= self.mine <= most * self.theirs * (1 + _SAME)


@dataclass
class Rates:
    """Compares the rates of the ranks with those of the script alone, `whole`.

    Attributes:
        own_lengths: runs it with the lengths that its loaders have in one process; None where it cannot.
        own_pace: records one process at its own pace, as far as the ranks' samples reach; None where it cannot.
        until: the first window that is not compared.
    """

    record: Record
    whole: Run
    own_lengths: Callable[[], Run] | None
    own_pace: Callable[[], Record] | None
    until: int | None

    def findings(self) -> Iterator[Finding]:
        """Yields a note on rates that are scaled, and what differs otherwise."""
        alone = self.whole.rank
        wrong, scaled = self._judged(list(self._by_step(alone)))
        is_often = wrong is not None and self._is_often(wrong.event, alone)
        if is_often and self.own_lengths is not None:
            again = self.own_lengths().rank
            other, then_scaled = self._judged(list(self._by_position(again)))
            if other is None and self._counts_parts(again):
                yield self._counted_in_parts()
                wrong, scaled = None, then_scaled
        elif wrong is not None and not is_often and self.own_pace is not None:
            paced = self.own_pace()
            pairs = list(self._by_samples(paced))
            other, then_scaled = self._judged(pairs)
            if pairs and other is None:
                wrong, scaled = None, then_scaled
                yield from self._warm_ups(paced.ranks[0].steps)
        if scaled is not None:
            yield self._finding(scaled, _SCALED, None, "note")
        if wrong is not None and is_often:
            times = f"the schedule moves on {self.record.size} times at every step, in one process once"
            yield self._finding(wrong, times, _FIX_OFTEN)
        elif wrong is not None:
            times = "" if not wrong.theirs else f"{wrong.mine / wrong.theirs:.4g} times, "
            yield self._finding(wrong, f"{times}which is no rule for {self.record.size}", _FIX)

    def _steps(self) -> Iterator[Event]:
        for event in self.record.ranks[0].steps[: self.record.steps]:
            if self.until is not None and event["window"] >= self.until:
                return  # the schedule may go by the steps that are taken
            yield event

    def _by_step(self, alone: Rank) -> Iterator[_Pair]:
        """Those where the gradients are kept count: in between, one process has weights of its own."""
        kept = {event["event"] for event in alone.of("step")}
        if not self.record.is_alike:
            yield from self._by_name(alone, kept)
            return
        theirs = {(event["event"], event["optimizer"]): event["rates"] for event in alone.of("rates")}
        for event in self._steps():
            rates = zip(event["rates"], theirs.get((event["event"], event["optimizer"]), []), strict=False)
            for group, (one, other) in enumerate(rates):
                yield _Pair(event, group, one, other, event["event"] in kept)

    def _by_name(self, alone: Rank, kept: set[int]) -> Iterator[_Pair]:
        """Those of the parameters that each rank's optimizer holds."""
        theirs = {event["event"]: alone.rates_by_name(event) for event in alone.of("rates")}
        for place, event in enumerate(self._steps()):
            own = theirs.get(event["event"], {})
            for rank, step in zip(self.record.ranks, self.record.events_of_step(place), strict=False):
                for name, rate in rank.rates_by_name(step).items():
                    if name in own:
                        yield _Pair(event, name, rate, own[name], event["event"] in kept)

    def _by_position(self, alone: Rank) -> Iterator[_Pair]:
        """Of steps before which the schedule has moved on as often.

        Some libraries move a schedule on once for each rank, since it was written for the batches of one process. That
        is right where one process has so many times as many batches, and the schedule is as long as these.
        """
        moved = schedule_steps(alone)
        theirs: dict[tuple[int, int], list[float]] = {}
        for event in alone.of("rates"):
            theirs.setdefault((event["optimizer"], moved[event["event"]]), event["rates"])
        mine = schedule_steps(self.record.ranks[0])
        for event in self._steps():
            rates = zip(event["rates"], theirs.get((event["optimizer"], mine[event["event"]]), []), strict=False)
            yield from (_Pair(event, group, one, other) for group, (one, other) in enumerate(rates))

    def _by_samples(self, alone: Record) -> Iterator[_Pair]:
        """Those of the steps in which one process would use the samples of a step of the ranks: the nearest one's.

        A schedule may be as long as the passes, which N ranks make in an Nth of the steps where the size of a process's
        batches is given. Where its warm-up has as many steps for N ranks as for one process, those are held against
        each other; later steps may be up to the samples of this warm-up behind.
        """
        steps = alone.ranks[0].steps if alone.ranks and self.record.is_alike else []
        mine = list(self._steps())
        turns, size = len({event["optimizer"] for event in mine}), self.record.size
        if len(steps) < _AS_FAR * size * len(mine):
            return
        warm_up = self._warm_up(steps) // turns
        times = self._times_as_many(alone, len(mine)) or size
        for place, event in enumerate(mine):
            at, turn = divmod(place, turns)
            first, end = (at, at + 1)
            if at >= warm_up:
                first, end = math.floor((at - warm_up) * times), math.ceil((at + 1) * times)
            theirs = [one["rates"] for one in steps[first * turns + turn : end * turns : turns]]
            if len(theirs) < end - first:
                return
            for group, rate in enumerate(event["rates"]):
                rates = [one[group] for one in theirs if group < len(one)] or [0.0]
                yield _Pair(event, group, rate, min(max(rate, min(rates)), max(rates)))

    def _times_as_many(self, alone: Record, count: int) -> float | None:
        """How many steps one process takes for one of the ranks', both to their ends; last batches may be smaller."""
        every = [*self.record.ranks, *alone.ranks]
        is_over = all(rank.is_complete for rank in every) and not self.record.is_cut_short
        times = len(alone.ranks[0].steps) / count
        return times if is_over and times <= self.record.size else None

    def _warm_up(self, steps: list[Event]) -> int:
        """How many steps, of the ranks as of one process, come before the highest rate; 0 where these are not alike."""
        ours, theirs = ([one["rates"][0] for one in own] for own in (list(self._steps()), steps))
        before = ours.index(max(ours))
        return before if theirs.index(max(theirs)) == before else 0

    def _warm_ups(self, steps: list[Event]) -> Iterator[Finding]:
        if count := self._warm_up(steps):
            yield Finding(
                code="learning-rate-differs",
                severity="note",
                where=self._set_at(count),
                cause=f"the warm-up has {plural(count, 'step')} for {self.record.size} ranks as for one process, whose "
                "steps have fewer samples",
                fix=None,
            )

    def _judged(self, pairs: list[_Pair]) -> tuple[_Pair | None, _Pair | None]:
        """Returns the first pair that no scale explains, and the first, before it, that is scaled."""
        groups: dict[tuple[int, int | str], list[_Pair]] = {}
        for pair in pairs:
            groups.setdefault((pair.event["optimizer"], pair.group), []).append(pair)
        most = {name: _most(theirs, self.record.size) for name, theirs in groups.items()}
        scaled = None
        for pair in [pair for pair in pairs if pair.counts]:
            if not pair.is_between(most[pair.event["optimizer"], pair.group]):
                return pair, scaled
            if scaled is None and not pair.is_between(1.0):
                scaled = pair
        return None, scaled

    def _is_often(self, event: Event, alone: Rank) -> bool:
        """Whether before this step the ranks have moved the schedule on once for each of them."""
        moved = schedule_steps(self.record.ranks[0])[event["event"]]
        return 0 < moved == self.record.size * schedule_steps(alone).get(event["event"], 0)

    def _counts_parts(self, alone: Rank) -> bool:
        """Whether a rank has one of so many parts of the batches of one process, as far as their number is known."""
        own = {event["key"]: event["own"] for event in alone.of("own_length")}
        mine = {one.about["key"]: one.about["length"] for one in passes(self.record.ranks[0]) if one.is_training}
        pairs = [(own.get(key), length) for key, length in mine.items()]
        size = self.record.size
        return all(None in pair or abs(pair[0] - size * pair[1]) < size for pair in pairs)

    def _set_at(self, event: int) -> str | None:
        """Where the rates of this step are set: as the optimizer is made, or by a schedule.

        If the schedule has moved on as often as in one process, it was made with another length, or rate.
        """
        first = self.record.ranks[0]
        made = first.of("optimizer")
        moved = [one for one in first.of("scheduler") if one.get("event", 0) <= event]
        if not (moved and event):
            return made[0]["where"] if made else None
        schedules = {one["where"] for one in first.of("schedule_made")}
        times = schedule_steps(first).get(event, 0)
        is_in_step = times <= event and times == schedule_steps(self.whole.rank).get(event)
        where: str = schedules.pop() if is_in_step and len(schedules) == 1 else moved[-1]["where"]
        return where

    def _finding(self, pair: _Pair, why: str, fix: str | None, severity: Severity = "error") -> Finding:
        return Finding(
            code="learning-rate-differs",
            severity=severity,
            step=pair.event["event"],
            factor=round(pair.mine / pair.theirs, 6) if pair.theirs else None,
            where=self._set_at(pair.event["event"]),
            cause=f"at step {pair.event['event']} {self.record.size} ranks step with the rate {pair.mine:.4g}, one "
            f"process with {pair.theirs:.4g}: {why}",
            fix=fix,
        )

    def _counted_in_parts(self) -> Finding:
        size = self.record.size
        return Finding(
            code="learning-rate-differs",
            severity="note",
            where=self.record.ranks[0].of("scheduler")[0]["where"],
            cause=f"{size} ranks move the schedule on {size} times where one process does once: it counts batches of "
            "one rank, and so does its length",
            fix=None,
        )


def judge_scaled(record: Record, own_pace: Callable[[], Record], report: Report) -> None:
    """Makes an error of a note on scaled rates where one process, too, has the samples of all ranks in a step.

    Args:
        record: of the ranks, whose gradients are those of one process.
        own_pace: records one process at its own pace.
        report: with the note.
    """
    notes = [one for one in report.findings if one.severity == "note" and one.cause.endswith(_SCALED)]
    if not notes or report.coverage.get("gradients") != AGREES:
        return
    if not are_as_many(record, own_pace()):
        return
    for note in notes:
        report.findings.remove(note)
        cause = f"{note.cause}, but one process has as many samples in a step as all ranks together"
        report.add([replace(note, severity="error", cause=cause, fix=_FIX_SCALED)])


def judge_settings(record: Record, own_pace: Callable[[], Record], report: Report) -> None:
    """Adds whether optimizers have other numbers than in one process, such as the weight decay, at as many samples.

    Elsewhere these numbers are lent to one process, since some are scaled with the ranks.
    """
    is_known = record.is_alike and report.coverage.get("gradients") in {AGREES, DECLARED}
    if not is_known or not are_as_many(record, own_pace()):
        return
    first, alone = record.ranks[0], own_pace().ranks[0]
    for step, other in zip(first.steps[: record.steps], alone.steps, strict=False):
        if step["optimizer"] == other["optimizer"] and (apart := settings_apart(step, other)):
            name, mine, theirs = apart[0]
            made = [one["where"] for one in first.of("optimizer") if one["number"] == step["optimizer"]]
            found = Finding(
                code="update-differs",
                step=step["event"],
                factor=round(mine / theirs, 6) if isinstance(mine, float) and theirs else None,
                where=next(iter(made), None) or step["where"],
                cause=f"the ranks step with the {name.replace('_', ' ')} {_shown(mine)}, and one process, whose steps "
                f"have as many samples as those of all ranks, with {_shown(theirs)}",
                fix="compute it from the data of all ranks: len(dataset), not len(sampler) or len(loader)",
            )
            report.add([found])
            return


def by_place(
    record: Record, alone: Record, places: Sequence[Mapping[str, Place]], number: int
) -> Iterator[tuple[Rank, str, float, float]]:
    """Yields each rank's parameters with their rates, and those of one process's parameters in their places."""
    own, theirs = alone.ranks[0].steps[number], {}
    for name, rate in alone.ranks[0].rates_by_name(own).items():
        theirs[of_optimizer(own["optimizer"], name)] = rate
    for rank, found in zip(record.ranks, places, strict=True):
        step = rank.steps[number]
        for name, rate in rank.rates_by_name(step).items():
            place = found.get(of_optimizer(step["optimizer"], name))
            if place is not None and not place.candidates and place.name in theirs:
                yield rank, name, rate, theirs[place.name]


def are_alike_by_place(record: Record, alone: Record, places: Sequence[Mapping[str, Place]], number: int) -> bool:
    """Returns whether the rates of a step are one process's; where no place is known, whether both have the same."""
    if pairs := [*by_place(record, alone, places, number)]:
        return all(math.isclose(mine, other) for _, _, mine, other in pairs)
    rates = [{*rank.steps[number]["rates"]} for rank in [*record.ranks, alone.ranks[0]]]
    return all(one == rates[0] for one in rates)


def settings_apart(step: Event, other: Event) -> list[tuple[str, Any, Any]]:
    """Returns name and values of each number of an optimizer's groups but their rates that two steps have otherwise."""
    both = zip(step["settings"], other["settings"], strict=False)
    known = [(name, one, theirs[name]) for mine, theirs in both for name, one in mine.items() if name in theirs]
    return [(name, one, two) for name, one, two in known if "lr" not in name and not _are_near(one, two)]


def _are_near(one: Any, other: Any) -> bool:
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        return all(map(_are_near, one, other))
    are_numbers = isinstance(one, int | float) and isinstance(other, int | float)
    return math.isclose(one, other, rel_tol=_SAME) if are_numbers else bool(one == other)


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else str(value)


def are_as_many(record: Record, alone: Record) -> bool:
    """Returns whether one process at its own pace has as many samples in a step as all ranks together."""
    ours, theirs = samples_of_steps(record.data.ranks), samples_of_steps(alone.ranks[:1])
    both = [(ours[window], theirs[window]) for window in ours if window in theirs]
    return bool(both) and all(mine == other for mine, other in both)


def samples_of_steps(ranks: Sequence[Rank]) -> dict[int, int]:
    """Returns window -> how many samples are trained on in it: as DataLoaders yield them, else as models get them."""
    loaded: Counter[int] = Counter()
    given: Counter[int] = Counter()
    for rank in ranks:
        for batch in rank.of("batch"):
            loaded[batch["window"]] += batch["size"] if batch["training"] else 0
        for window in {one["window"] for one in rank.of("input")}:
            given[window] += sum(map(len, calls_in(rank, window)))
    steps = {step["window"] for rank in ranks for step in rank.steps}
    found = loaded if any(loaded.values()) else given
    return {window: found[window] for window in sorted(steps) if found[window]}


def _most(pairs: list[_Pair], size: int) -> float:
    """How many times as high as in one process the ranks' rates may be, by what their highest is."""
    highest = max(pair.mine for pair in pairs)
    at_most = [pair for pair in pairs if pair.mine >= highest * (1 - _SAME)]
    for times in (1.0, size**0.5):
        if any(pair.mine <= times * pair.theirs * (1 + _SAME) for pair in at_most):
            return times
    return float(size)


def schedule_steps(rank: Rank) -> dict[int, int]:
    """Returns event -> how often schedules have moved on before that optimizer step."""
    moved, counts = 0, {}
    for event in rank.of("step", "rates", "scheduler"):
        if event["kind"] == "scheduler":
            moved += 1
        else:
            counts[event["event"]] = moved
    return counts
