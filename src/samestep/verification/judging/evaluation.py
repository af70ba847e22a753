"""Whether an evaluation is that of one process: what it comes to, and the buffers with which it is made.

counts      all_reduce([correct, seen])           N ranks and one process have the same sums
means       all_reduce(accuracy of a rank) ÷ N    their mean is the one-process value only where parts are alike
metrics     print(accuracy)                       the last word: sums that differ (times, say) explain one that differs
samples     of each pass, once over all ranks     where neither a sum nor a metric tells
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

from samestep.runtime.digest import digest
from samestep.text import listed, plural
from samestep.verification import numerics
from samestep.verification.findings import (
    AGREES,
    NO_OUTCOME,
    NONE_SEEN,
    NOT_REACHED,
    PROVED,
    REFUTED,
    Finding,
    unchecked,
)
from samestep.verification.journal import Event, place_of
from samestep.verification.judging.evaluation_outcomes import Outcome, Place, outcomes
from samestep.verification.judging.passes import Pass, are_loaded, loads_for_all, passes
from samestep.verification.judging.printed import Alike, Difference, metrics_alike, numbers_of
from samestep.verification.judging.record import (
    Rank,
    Record,
    Run,
    beside_first,
    both,
    line_of,
    model_inputs,
    part_at,
    pass_of,
)
from samestep.verification.judging.samples import fills_up, mean_the_same
from samestep.verification.judging.states import differing, differing_ranks
from samestep.verification.recording.evaluations import STATISTICS
from samestep.verification.report import Report

_CHOSEN = {"MAX", "MIN"}  # reductions that bring one rank's number
_OF_AVERAGES = 1e-2  # of a tensor's norm: so far apart are averages of what has drifted apart by rounding
_MISCOUNTED = 0.02  # of a count: hits differ by rounding, and padding adds few samples
_PRECISE = 3e-4  # of a printed number, its last digit: it shows also few samples that come twice
_STEADY = 1e-3  # of a number that one process comes to twice
_CLOSE = 1e-4  # of a sum; the parameters are the same, so this is rounding

_EXACT = 1e-8  # of a number, in float64
_LOW = 2**-7  # of a number: the precision of bfloat16; what is further apart is not rounded, though runs may differ
_NOTHING = 1e-4  # of a number's size: what is left of rounding in float64 is some 1e-9 of it

_SUMS = "all_reduce the sum over the samples and their number, then divide once; samestep.evaluate(…) does all of it"


def judge(
    record: Record,
    alone: Record | None,
    report: Report,
    permuted: Callable[[], Run] | None = None,
    *,
    apart: bool = False,
    unnamed: bool = False,
) -> None:
    """Adds what evaluations tell.

    Args:
        record: of the ranks.
        alone: the script run alone, if it ran.
        report: to add to.
        permuted: runs it once more from the same weights; numbers that are other ones then (times, say) tell nothing.
        apart: it has trained on the batches of one rank, since those of all cannot be joined.
        unnamed: whether numbers count that the script calls by words of its own; the training is known to be the same.
    """
    report.add(_averaged(record))
    report.add(_loaded_apart(record, alone))
    report.add(() if apart else _counted(record, alone, permuted))
    out_of_step = alone is not None and any(rank.of("out_of_step") for rank in alone.ranks)
    if REFUTED in {report.coverage.get(name) for name in ("initial_state", "parameters", "parameter_order")}:
        alone = None  # the ranks evaluate different models
    elif out_of_step and loads_for_all(record) is not None:
        alone = None  # it evaluates other weights
    unplaced = alone if alone is not None and alone.ranks else None
    alone = None if unplaced is None else _placed(unplaced)
    compared = list(_metrics(record, alone))
    report.add([finding for finding in compared if finding is not None][:1])
    evaluations = [outcomes(rank) for rank in record.ranks]
    if not any(evaluations):
        _judge_buffers(record, evaluations, report, is_wrong=False)
        if any(rank.of("metrics") for rank in record.ranks):
            why = "the script did not run alone" if alone is None else "no number of it could be compared"
            report.cover("evaluation", AGREES if compared else unchecked(why))
            return
        report.cover("evaluation", NOT_REACHED if record.is_cut_short else NONE_SEEN)
        return
    theirs = {} if alone is None else outcomes(alone.ranks[0])
    by_batch = {phase for mine in evaluations for phase, one in mine.items() if one.by_batch}
    may_differ = by_batch | _drawn_apart(evaluations) | _of_others(record, alone)
    sampled = list(_samples(record, unplaced))
    found, printed, sums = _compared(record, evaluations, theirs, may_differ, has_samples=bool(sampled))
    if (found or printed.unknown) and permuted is not None and permuted().record.ranks:
        steady = _steady(theirs, outcomes(_placed(permuted().record).ranks[0]))
        found, printed, sums = _compared(record, evaluations, steady, may_differ, has_samples=bool(sampled))
    if unnamed and not found and _is_of_all(printed.unknown, record, confirmed=None in sums):
        found = [_printed(printed.unknown, record)]
    gathers = any(one.gathers for mine in evaluations for one in mine.values())
    may_take_out = gathers and not any(_extra_and_missing(group, record, unplaced)[1] for group in _splits(record))
    hidden = bool(sampled) and printed.finest > _PRECISE and not gathers
    confirmed = (printed.alike and not hidden) or (printed.saturated and not sampled)
    confirmed = confirmed or None in [*sums, *compared]
    confirmed = confirmed or (not found and printed.unnamed and printed.unknown is None)
    confirmed = confirmed or _agrees_by_itself(record, evaluations, unplaced, miscounts=bool(sampled))
    of_parts = not any(one.brings_together for mine in evaluations for one in mine.values())
    tails = list(_tails(record))
    if found and tails:
        found = tails  # what is left out is the cause
    elif found and sampled and not gathers:
        found = [replace(sampled[0], cause=f"{sampled[0].cause}: {found[0].cause}")]
    elif not found and not confirmed:
        found = ([] if of_parts or may_take_out or (hidden and printed.alike) else sampled) or tails
    if found and report.coverage.get("parameters") != REFUTED:
        found = list(_weights_apart(record)) or found
    report.add(found[:1] or [replace(one, severity="note", fix=None) for one in tails])
    _judge_buffers(record, evaluations, report, is_wrong=bool(found))
    if confirmed:
        report.cover("evaluation", AGREES)
    elif unseen := next(filter(None, (_filled_and_gathered(group, record) for group in _splits(record))), None):
        report.cover("evaluation", unchecked(unseen))
    elif reason := _incomparable(printed, record, by_batch=bool(by_batch), of_parts=of_parts):
        report.cover("evaluation", unchecked(reason))
    elif sampled:
        hides = (
            "what is gathered may leave them out" if may_take_out else "what is printed has too few digits to show it"
        )
        report.cover("evaluation", unchecked(f"{sampled[0].cause}, and {hides}"))
    else:
        report.cover("evaluation", AGREES, "each sample once; neither a sum nor a metric was seen")


def _counted(record: Record, alone: Record | None, permuted: Callable[[], Run] | None) -> Iterator[Finding]:
    """Whether what ranks count together while they train is what one process counts, or N times as much.

    Without a DataLoader, one process may have other samples by then, of environments that actions have changed. Batches
    that were made anew may be filled up to other lengths. What one process comes to otherwise when it runs once more,
    milliseconds say, is no count.
    """
    if alone is None or any(rank.of("collated") for rank in alone.ranks):
        return
    for place, theirs, mine in both(_counts(alone), _counts(record)):
        if len(theirs["values"]) != len(mine["values"]) or theirs["window"] != mine["window"]:
            continue
        if _has_other_samples(record, alone, mine["window"]):
            return
        sizes = {1, record.size, _size(mine["group"], record.size)}
        for one, other in zip(mine["values"], theirs["values"], strict=True):
            is_count = one.is_integer() and other.is_integer() and other > 1
            if is_count and not any(_close(one / size, other, _MISCOUNTED) for size in sizes):
                again = None if permuted is None else _counts(permuted().record).get(place)
                if again is None or again["values"] == theirs["values"]:
                    yield _inexact(mine["where"], one, other, record.size)
                return


def _has_other_samples(record: Record, alone: Record, until: int) -> bool:
    if are_loaded(record):
        return False
    mine, theirs = (model_inputs(one.data.ranks, range(until + 1)) for one in (record, alone))
    return mine != theirs


def _counts(record: Record) -> dict[tuple[str, int], Event]:
    return {(event["where"], event["number"]): event for rank in record.ranks[:1] for event in rank.of("counted")}


def _compared(
    record: Record,
    evaluations: list[dict[str, Outcome]],
    theirs: dict[str, Outcome],
    may_differ: set[str],
    *,
    has_samples: bool,
) -> tuple[list[Finding], Alike, list[Finding | None]]:
    """Compares sums and lines with one process's: returns what is wrong, how lines compare, and sums one by one."""
    sums = _sums(record, evaluations, theirs, may_differ)
    printed = metrics_alike(
        [_lines(one) for one in evaluations],
        _lines(theirs),
        may_differ,
        known=None in sums,
        gathers=any(one.gathers for mine in evaluations for one in mine.values()),
        miscounts=has_samples,
    )
    is_right = printed.whole and not printed.different and not has_samples
    found = [] if is_right else [one for one in sums if one is not None]
    if not found and printed.different is not None:
        found = [_printed(printed.different, record)]
    return found, printed, sums


def _steady(theirs: dict[str, Outcome], again: dict[str, Outcome]) -> dict[str, Outcome]:
    """Leaves out sums and lines of one process that come to other numbers when it runs once more."""
    found = {}
    for phase, one in theirs.items():
        other = again.get(phase, one)
        sums = {
            place: event
            for place, event in one.sums.items()
            if place not in other.sums or _are_close(event["values"], other.sums[place]["values"])
        }
        lines = {
            place: event
            for place, event in one.lines.items()
            if place not in other.lines or _are_close(numbers_of(event), numbers_of(other.lines[place]))
        }
        found[phase] = replace(one, sums=sums, lines=lines)
    return found


def _are_close(mine: Sequence[float], theirs: Sequence[float]) -> bool:
    return len(mine) == len(theirs) and all(
        _close(one, other, _STEADY) for one, other in zip(mine, theirs, strict=True)
    )


def judge_swapped(record: Record, whole: Run, permuted: Callable[[], Run], report: Report) -> None:
    """Adds whether the parameters that a script evaluates with, and its steps have not made, are one process's.

    It is an average of them, say. What a step has left there, such as the best parameters so far, is a choice: one
    process may make it otherwise by rounding.

    Args:
        record: of the ranks.
        whole: the script alone.
        permuted: runs it with the samples of each batch in another order: how far rounding takes such parameters.
        report: to add to.
    """
    for window, mine, where in _swapped(whole):
        theirs = {name: one for name, own, one in both(mine, record.parameters(window)) if one.shape == own.shape}
        if not theirs or _were_made(record, theirs) or _evaluate_others(record, window):
            continue
        apart = numerics.distance(theirs, {name: mine[name] for name in theirs})
        if apart.worst <= _OF_AVERAGES:
            continue
        again = next((values for other, values, _ in _swapped(permuted()) if other == window), None)
        floor = math.inf if again is None else numerics.distance(again, mine).worst
        if apart.worst > numerics.ABOVE_FLOOR * floor:
            report.add([_evaluated_apart(window - 1, apart, where)])
            return


def _swapped(run: Run) -> Iterator[tuple[int, dict[str, Any], str]]:
    for event in run.rank.of("swapped"):
        if event["kept"] is not None:
            yield event["window"], run.record.value(0, event["kept"]), event["where"]


def _evaluate_others(record: Record, window: int) -> bool:
    """Whether ranks evaluate with parameters of their own there, as in a search."""
    evaluations = [
        [one for one in rank.of("evaluates") if int(one["phase"].split(".")[0]) <= window] for rank in record.ranks
    ]
    return all(evaluations) and differing_ranks([events[-1] for events in evaluations], "parameters") is not None


def _were_made(record: Record, values: dict[str, Any]) -> bool:
    """Whether all of some parameters are what a step has made of them, or has begun with."""
    rank = record.ranks[0]
    known: dict[str, set[str]] = {}
    for step in rank.steps:
        for parameters in (step["parameters"], step["after"] or {}):
            for name, one in parameters.items():
                known.setdefault(name, set()).add(one)
    for name, value in values.items():
        place = place_of(next(iter(known.get(name, ())), None))
        own = f"{place} {digest(part_at(value, place))}" if place else digest(value)
        if place != "nowhere" and own not in known.get(name, ()):
            return False
    return True


def _evaluated_apart(step: int, apart: numerics.Distance, where: str) -> Finding:
    return Finding(
        code="parameters-diverged",
        property="evaluation",
        step=step,
        tensor=apart.tensor,
        where=where,
        cause=f"behind step {step} the ranks evaluate with other values in {apart.tensor} than one process: an error "
        f"of {apart.worst:.1e} of its norm. No step has made them: an average of the weights, say, that is another on "
        "some rank, or was loaded from another rank's",
        fix="keep, save and load for each rank its own part of such an average, or the whole on all",
    )


def _agrees_by_itself(
    record: Record, evaluations: list[dict[str, Outcome]], alone: Record | None, *, miscounts: bool
) -> bool:
    """Whether one process comes to the ranks' numbers with weights of its own, which differ from theirs by rounding."""
    if alone is None:
        return False
    theirs = outcomes(alone.ranks[0])
    lines = metrics_alike([_lines(one) for one in evaluations], _lines(theirs))
    sums = _sums(record, evaluations, theirs, set())
    return (lines.whole and not miscounts) or (bool(sums) and all(one is None for one in sums))


def is_rounding(where: str | None, records: tuple[Record, Record], in_float64: tuple[Record, Record]) -> bool:
    """Whether the numbers of a line that differ are rounding alone: in float64 they agree, or are next to nothing.

    Args:
        where: the line.
        records: of the ranks, and of the script alone.
        in_float64: the same.
    """
    mine, theirs, *double = (_numbers_at(where, record) for record in (*records, *in_float64))
    apart = []
    for place, ours, others in both(mine, theirs):
        for number, (one, other) in enumerate(zip(ours, others, strict=False)):
            if not _close(one, other):
                found = [each[place][number] for each in double if number < len(each.get(place, ()))]
                size = max(abs(one), abs(other))
                is_nothing = all(abs(value) <= _NOTHING * size for value in found)
                is_known = len(found) == len(double)
                agrees = is_known and _close(one, other, _LOW) and _close(found[0], found[1], _EXACT)
                apart.append(is_known and (is_nothing or agrees))
    return bool(apart) and all(apart)


def _numbers_at(where: str | None, record: Record) -> dict[Place, list[float]]:
    """What the first rank's evaluations sum up, or print, at a line."""
    found: dict[Place, list[float]] = {}
    for one in outcomes(record.ranks[0]).values():
        found |= {place: event["values"] for place, event in one.sums.items() if event["where"] == where}
        found |= {place: numbers_of(event) for place, event in one.lines.items() if event["where"] == where}
    return found


def _drawn_apart(ranks: list[dict[str, Outcome]]) -> set[str]:
    """The phases in which ranks draw other numbers: rollouts of a policy, of which one process has one rank's."""
    found = set()
    for phase in ranks[0]:
        same_phase = [mine[phase] for mine in ranks if phase in mine]
        drew = [{event["drew"] for event in [*one.sums.values(), *one.lines.values()]} for one in same_phase]
        drew = [one for one in drew if one]
        if any(one != drew[0] for one in drew):
            found.add(phase)
    return found


def _of_others(record: Record, alone: Record | None) -> set[str]:
    """The phases without a DataLoader in which one process has given its models other data than the ranks: rollouts.

    Where samples come twice, or never, all that one side has are among the other's.
    """
    theirs = {} if alone is None else _seen(alone.ranks[:1])
    pairs = ((phase, mine, theirs.get(phase, set())) for phase, mine in _seen(record.ranks).items())
    return {phase for phase, mine, other in pairs if mine and other and not (mine <= other or other <= mine)}


def _seen(ranks: list[Rank]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for rank in ranks:
        for event in rank.of("seen"):
            found.setdefault(event["phase"], set()).update(event["rows"])
    return found


def _lines(evaluations: dict[str, Outcome]) -> dict[Place, Event]:
    return {place: event for one in evaluations.values() for place, event in one.lines.items()}


def _incomparable(printed: Alike, record: Record, *, by_batch: bool, of_parts: bool) -> str | None:
    """Why its outcome could not be compared."""
    if by_batch:
        return "the model is in training mode, and its BatchNorm makes of a sample what the others of its batch are"
    if printed.unknown is not None:
        return (
            f"a number that is printed at {printed.unknown.where} is not one process's, and what it means is not known"
        )
    if printed.unsure:
        return "it draws random numbers, alone other ones, and comes to another metric"
    if not any(_splits(record)) and printed.local is None:
        return NO_OUTCOME.partition(": ")[2]
    where = "" if printed.local is None else f" at {printed.local}"
    return f"each rank tells of its own part{where}, and nothing of the whole was seen" if of_parts else None


def _is_of_all(unknown: Difference | None, record: Record, *, confirmed: bool) -> TypeGuard[Difference]:
    """Whether a number of no known meaning must be one process's, and may not be of rank 0's own batches.

    In a row of a table no word stands before it. Then it may be of the training, where sums confirm the evaluation.
    """
    if unknown is None or not unknown.is_of_evaluation or (confirmed and not unknown.name):
        return False
    return not _are_counts(unknown, record.size)


def _are_counts(found: Difference, size: int) -> bool:
    """Whether a number may be counted for each rank: it is N times one process's, or an Nth."""
    try:
        mine, theirs = float(found.mine), float(found.theirs)
    except ValueError:
        return True
    return any(_close(mine, factor * theirs) for factor in (size, 1 / size))


def _printed(difference: Difference, record: Record) -> Finding:
    gathers = [event["where"] for event in record.ranks[0].of("collected") if "rows" in event]
    return Finding(
        code="evaluation-inexact",
        where=gathers[-1] if gathers else difference.where,
        cause=f"with the same weights the ranks come to {difference.name} {difference.mine}, one process to "
        f"{difference.theirs}",
        fix="bring predictions and labels of all ranks into one order, every sample once; samestep.evaluate(…) does",
    )


def _tails(record: Record) -> Iterator[Finding]:
    """Evaluations whose loader leaves the last samples out, on every rank."""
    evaluated = {pass_of(event) for event in record.ranks[0].of("evaluated")}
    mine = [{one.key: one for one in passes(rank)} for rank in record.ranks]
    for key, one in mine[0].items():
        if key not in evaluated or one.is_training or not one.about["drop_last"]:
            continue
        group = [theirs[key] for theirs in mine if key in theirs]
        size, known = one.size or 0, all(each.complete and each.indices is not None for each in group)
        missing = size - len({index for each in group for index in each.indices or ()}) if known else 0
        if missing > 0 and missing not in _beside(one, record):
            yield Finding(
                code="evaluation-inexact",
                where=one.line,
                cause=f"{missing} of {plural(size, 'sample')} are in no batch: drop_last",
                fix="drop_last=False for evaluation",
            )
            return


def _placed(alone: Record) -> Record:
    """Returns what the script alone evaluates with the recorded weights; its own differ from them by rounding."""
    ranks = [Rank(rank.number, [one for one in rank.events if one.get("placed", True)]) for rank in alone.ranks]
    return Record(alone.folder, ranks)


def _metrics(record: Record, alone: Record | None) -> Iterator[Finding | None]:
    """What samestep.evaluate has returned, on the ranks and alone, from the same weights; None where it agrees."""
    theirs = {} if alone is None else _returned(alone)
    for _, here, there in both(_returned(record), theirs):
        for _, mine, other in both(here["metrics"], there["metrics"]):
            yield None if _close(mine, other) else _inexact(here["where"], mine, other, 1)


def _returned(record: Record) -> dict[tuple[Any, ...], Event]:
    """(window, line, how many there before) -> what samestep.evaluate has returned."""
    return _numbered(record.ranks[0].of("metrics"), lambda event: (event["window"], event["where"]))


def _judge_buffers(record: Record, evaluations: list[dict[str, Outcome]], report: Report, *, is_wrong: bool) -> None:
    """Adds the first buffers with which a rank evaluates otherwise than rank 0.

    What a rank comes to with statistics of its own is an error where it counts: its numbers are brought together, or
    printed. Other buffers, a counter say, do no harm unless the evaluation is known to come to other numbers.
    """
    held = [{pass_of(event): event for event in rank.of("buffers")} for rank in record.ranks]
    for rank, place, first, event in beside_first(held):
        if bad := differing(first["digests"], event["digests"]):
            outcome = evaluations[rank].get(event["phase"]) if "phase" in event else None
            counts = outcome is None or outcome.brings_together or bool(outcome.lines)
            is_used = counts and (is_wrong or any(name.endswith(STATISTICS) for name in bad))
            found = _buffers(record, rank, place[0], bad)
            report.add([found if is_used else replace(found, severity="note", fix=None)])
            return
    if any(held):
        report.cover("buffers", PROVED)


def _averaged(record: Record) -> Iterator[Finding]:
    """Whether ranks use a model that no optimizer steps, such as an average of the weights, with equal values."""
    used = [_numbered(rank.of("averaged"), lambda event: (event["window"],)) for rank in record.ranks]
    for rank, place, first, other in sorted(beside_first(used), key=lambda pair: pair[:2]):
        mine, theirs = first["digests"], other["digests"]
        are_kept = all(_never_change(record.ranks[each].of("averaged")) for each in (0, rank))  # teachers, dealt out
        if mine.keys() == theirs.keys() and not are_kept and (bad := differing(mine, theirs)):
            step, number = place[0] - 1, record.ranks[rank].number
            yield Finding(
                code="parameters-diverged",
                property="evaluation",
                rank=number,
                step=step,
                tensor=bad[0],
                where=other["where"],
                cause=f"behind step {step} rank {number} uses other values than rank 0 in {listed(bad)}, which no "
                "optimizer holds: an average of the weights that some ranks do not update, or from other weights",
                fix="update the average on every rank, behind the step and once all ranks have its parameters",
            )
            return


def _never_change(used: list[Event]) -> bool:
    windows: dict[int, list[Any]] = {}
    for event in used:
        windows.setdefault(event["window"], []).append(event["digests"])
    first, *others = windows.values()
    return bool(others) and all(one == first for one in others)


def _numbered(events: list[Event], place: Callable[[Event], tuple[Any, ...]]) -> dict[tuple[Any, ...], Event]:
    """Returns events by their place and how many there are before at the same place."""
    seen: Counter[tuple[Any, ...]] = Counter()
    found: dict[tuple[Any, ...], Event] = {}
    for event in events:
        at = place(event)
        found[(*at, seen[at])] = event
        seen[at] += 1
    return found


def _loaded_apart(record: Record, alone: Record | None) -> Iterator[Finding]:
    """Whether ranks evaluate with other parameters, since they have loaded others: the best of each rank's own, say.

    Not where one process makes more passes over the data there: then ranks divide what is loaded among themselves.
    """
    phases = {event["phase"] for event in record.ranks[0].of("evaluates") if event["loaded"] is not None}
    counts = [_count_passes(rank, phases) for one in (record, alone) if one is not None for rank in one.ranks[:1]]
    if counts[-1] > counts[0]:
        return
    used = [{event["phase"]: event for event in rank.of("evaluates")} for rank in record.ranks]
    for place, _, first, other in beside_first(used):
        sides = [(record.ranks[0], first), (record.ranks[place], other)]
        bad = differing_ranks([first, other], "parameters")
        loads = [event["loaded"] for event in (first, other) if event["loaded"] is not None]
        if bad is not None and loads and all(_had(rank, event, bad[1][0]) for rank, event in sides):
            number = record.ranks[place].number
            yield Finding(
                code="parameters-diverged",
                property="evaluation",
                rank=number,
                tensor=bad[1][0],
                where=loads[0],
                cause=f"rank {number} evaluates with other values than rank 0 in {listed(bad[1])}: the ranks have "
                "loaded different ones",
                fix="choose what is loaded by what all ranks know: reduce the metric before it is compared",
            )
            return


def _count_passes(rank: Rank, phases: Container[str]) -> int:
    return len({pass_of(event) for event in rank.of("evaluated") if event["phase"] in phases})


def _weights_apart(record: Record) -> Iterator[Finding]:
    """Whether ranks that trained equal parameters evaluate others: an average of them, say, that one rank alone has."""
    used = [{event["phase"]: event for event in rank.of("evaluates")} for rank in record.ranks]
    for place, _, first, other in beside_first(used):
        if (bad := differing_ranks([first, other], "parameters")) is not None and first.get("where"):
            number = record.ranks[place].number
            yield Finding(
                code="parameters-diverged",
                property="evaluation",
                rank=number,
                tensor=bad[1][0],
                where=first["where"],
                cause=f"rank {number} evaluates with other values than rank 0 in {listed(bad[1])}, though both have "
                "trained the same: one of them has put others in their place, such as an average of the weights",
                fix="keep the average on every rank, and put it in on all of them",
            )
            return


def _had(rank: Rank, event: Event, name: str) -> bool:
    """Whether a rank had the value with which it evaluates at some step, and did not make it for that."""
    digest, plain = event["parameters"][name], name.rpartition(": ")[2]
    states = [one for step in rank.steps for one in (step["parameters"], step["after"] or {})]
    return any(digest in (one.get(name), one.get(plain)) for one in states)


def _buffers(record: Record, rank: int, key: str, bad: list[str]) -> Finding:
    return Finding(
        code="buffers-diverged",
        rank=record.ranks[rank].number,
        tensor=bad[0],
        where=line_of(key),
        cause=f"rank {record.ranks[rank].number} evaluates with other values than rank 0 in {listed(bad, 'buffer')}: "
        "each rank has the statistics of its own batches",
        fix="broadcast the buffers from rank 0 before an evaluation, evaluate through the wrapped model, or use "
        "synchronised BatchNorm",
    )


def _sums(
    record: Record, ranks: list[dict[str, Outcome]], theirs: dict[str, Outcome], by_batch: set[str]
) -> list[Finding | None]:
    """Compares sums of the same data: a finding for each that differs, None for each that agrees."""
    found: list[Finding | None] = []
    ours = {event["where"] for event in record.ranks[0].of("metrics")}  # what samestep.evaluate sums up is its business
    for phase, one in ranks[0].items():
        if phase not in theirs or one.loaders != theirs[phase].loaders:
            continue  # other data follow, on the ranks or alone: only what is printed at the end is of all
        batches = (sum(each[phase].batches for each in ranks if phase in each), theirs[phase].batches)
        for place, here in one.sums.items():  # one may count batches, of which each rank has a last one of its own
            if (there := theirs[phase].sums.get(place)) is None or here["where"] in ours:
                continue
            if len(here["values"]) != len(there["values"]):
                continue  # a row for each rank, say
            sizes = {1, record.size, _size(here["group"], record.size)}
            pairs = list(zip(here["values"], there["values"], strict=True))
            if here["reduce"] in _CHOSEN:
                pairs = [pair for pair in pairs if not _is_length(pair[0], phase, ranks)]
            bad = next((pair for pair in pairs if pair != batches and not _agree(*pair, sizes, here["reduce"])), None)
            if bad is None and here["reduce"] in _CHOSEN:
                continue  # that they have one maximum, or stop at once, says little of the rest
            if bad is None or (here["drew"] == there["drew"] and phase not in by_batch):
                found.append(None if bad is None else _inexact(here["where"], *bad, record.size, here["reduce"]))
    return found


def _is_length(chosen: float, phase: str, ranks: list[dict[str, Outcome]]) -> bool:
    """Whether a maximum is the length of some rank's part, to which the others fill up what they then gather.

    Where rows are gathered, it may be that of anything of a batch; else it is that of samples or batches.
    """
    each = [mine[phase] for mine in ranks if phase in mine]
    gathers = chosen.is_integer() and any(one.gathers for one in each)
    return gathers or chosen in {count for one in each for count in (one.rows, one.batches)}


def _size(group: str, size: int) -> int:
    return size if group in {"world", "?"} else len(group.rpartition(":")[2].split(","))


def _agree(mine: float, theirs: float, sizes: set[int], reduce: str | None) -> bool:
    """Whether N ranks bring what one brings: the same, or N times as much where it is divided by N afterwards."""
    summed = reduce in {None, "SUM"}
    return _close(mine, theirs) or (summed and any(_close(mine / size, theirs) for size in sizes))


def _close(mine: float, theirs: float, share: float = _CLOSE) -> bool:
    if not (math.isfinite(mine) and math.isfinite(theirs)):
        return mine == theirs or (math.isnan(mine) and math.isnan(theirs))
    return abs(mine - theirs) <= share * max(abs(mine), abs(theirs), 1e-12)


def _inexact(where: str, mine: float, theirs: float, size: int, reduce: str | None = None) -> Finding:
    whole = mine.is_integer() and theirs.is_integer()  # infinities and NaN are none
    if reduce == "AVG":
        what = f"the mean of the ranks' values is {mine:.6g}, and one process has {theirs:.6g}"
    elif whole:
        what = f"the ranks sum up {mine:g} where one process counts {theirs:g}"
    else:
        what = f"the ranks' values add up to {mine:.6g}, divided by {size} ranks {mine / size:.6g}; one process has "
        what += f"{theirs:.6g}"
    return Finding(
        code="evaluation-inexact",
        where=where,
        cause=f"with the same weights {what}: samples are counted twice or left out, or means of unlike parts are "
        "averaged",
        fix=_SUMS,
    )


def _splits(record: Record) -> Iterator[list[Pass]]:
    """Yields the passes of evaluations whose samples the ranks have split between them, one list for each."""
    evaluated = {pass_of(event) for rank in record.ranks for event in rank.of("evaluated")}
    mine = [{one.key: one for one in passes(rank)} for rank in record.ranks]
    for name in sorted(evaluated):
        group = [theirs[name] for theirs in mine if name in theirs]
        if len(group) < record.size or not all(one.complete for one in group) or not mean_the_same(group, record):
            continue
        if any(one.is_training for one in group):
            continue
        parts = [set(one.indices or []) for one in group]
        whole = all(len(part) == one.size for part, one in zip(parts, group, strict=True))
        if not whole and not (group[0].about["drop_last"] and all(part == parts[0] for part in parts)):
            yield group  # else each evaluates all it has, but for a tail


def _samples(record: Record, alone: Record | None) -> Iterator[Finding]:
    """Yields what is wrong with such passes that have too many samples or too few."""
    for group in _splits(record):
        if _filled_and_gathered(group, record) is None:
            yield from _split(group, record, alone)


def _beside(one: Pass, record: Record) -> set[int | None]:
    """How many samples the other loaders of an evaluation have: one of them may bring what was left out."""
    phases = _phases_of(one, record)
    keys = {pass_of(event) for event in record.ranks[0].of("evaluated") if event["phase"] in phases} - {one.key}
    return {other.size for other in passes(record.ranks[0]) if other.key in keys}


def _phases_of(one: Pass, record: Record) -> set[str]:
    return {event["phase"] for event in record.ranks[0].of("evaluated") if pass_of(event) == one.key}


def _filled_and_gathered(group: list[Pass], record: Record) -> str | None:
    """Of samples that a library brings twice to fill last batches up: what it gathers, it may take out again.

    accelerate's gather_for_metrics does, and its gather does not: the collective is the same.
    """
    phases, cut_by = _phases_of(group[0], record), group[0].about.get("cut_by")
    gathers = any("rows" in event for event in record.ranks[0].of("collected") if event["phase"] in phases)
    if cut_by is None or not gathers or not fills_up(group):
        return None
    extra = sum(len(one.indices or []) for one in group) - group[0].about["samples"]
    what = "sample comes" if extra == 1 else "samples come"
    return (
        f"{extra} {what} twice, since {cut_by} fills the ranks' last batches up, and whether what is gathered keeps "
        "them was not seen"
    )


def _split(group: list[Pass], record: Record, alone: Record | None) -> Iterator[Finding]:
    extra, missing = _extra_and_missing(group, record, alone)
    if extra or missing:
        what = [f"{plural(extra, 'sample')} twice"] if extra else []
        what += [f"{plural(missing, 'sample')} never"] if missing else []
        yield Finding(
            code="evaluation-inexact",
            where=group[0].divided_at,
            cause=f"the ranks together evaluate {' and '.join(what)}, of {group[0].size}",
            fix=f"DataLoader(…, sampler=range(rank, len(dataset), world_size)), which does not pad; {_SUMS}",
        )


def _extra_and_missing(group: list[Pass], record: Record, alone: Record | None) -> tuple[int, int]:
    """How many samples too many the ranks together evaluate, and how many never, also by another loader.

    A sampler may choose a part of the dataset for validation: what one process does not evaluate either is not missing.
    """
    size = group[0].size
    if size is None:
        return 0, 0
    counts = Counter(index for one in group for index in one.indices or [])
    by_one = set() if alone is None else _evaluated_by_one(alone, group[0])
    missing = len(by_one - counts.keys()) if by_one else size - len(counts)
    return sum(counts.values()) - len(counts), 0 if missing in _beside(group[0], record) else missing


def _evaluated_by_one(alone: Record, of: Pass) -> set[int]:
    """The samples that one process has in the same pass; none where they are not known."""
    same = [one for rank in alone.ranks[:1] for one in passes(rank) if one.key == of.key and one.is_known]
    return {index for one in same[:1] for index in one.indices or ()}
