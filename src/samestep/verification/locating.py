"""Looks for the lines that make what was found, in further runs: by results, decisions, draws, hashes and writes."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

from samestep.verification.findings import Finding, unchecked
from samestep.verification.judging import samples, shards, split, storage
from samestep.verification.judging.causes import MOVED_APART, OUTSIDE, SHOWS_AT, UNREACHED, located
from samestep.verification.judging.lines import Lines
from samestep.verification.judging.own_data import OWN_PART
from samestep.verification.judging.own_pace import CARRIED_APART
from samestep.verification.judging.parts import SAME_INPUTS
from samestep.verification.judging.passes import are_loaded
from samestep.verification.judging.paths import Paths
from samestep.verification.judging.record import Record
from samestep.verification.judging.sources import Sources
from samestep.verification.recording.limit import PASSES
from samestep.verification.report import Report
from samestep.verification.runner import Runner

_LOCATED = {"gradient-scale", "gradient-differs", "update-differs", "evaluation-inexact"}  # by the lines that make them
_DECIDED = {"steps-differ", "learning-rate-differs", "parameters-diverged", "gradients-not-synchronised"}  # by numbers
OF_SAMPLES = {"samples-repeated", "samples-missing", "datasets-differ", "batches-differ"}
_NO_PLACEMENTS = (
    "this line takes the local tensor of a replicated DTensor, and the part of its gradient that a rank has is taken "
    "for the whole"
)
ENDS_ELSEWHERE = "the ranks end after another number of steps when they run again: by a clock, say"
_MOST_TRACED = 2  # evaluations whose lines are looked at


def by_local_tensors(runner: Runner, record: Record, steps: int, report: Report) -> None:
    """Looks for a replicated DTensor whose local tensor has another gradient on each rank: a part of a sum."""
    del runner, steps
    where = _partial_gradient(record)
    for found in report.errors if where is not None else ():
        if found.property == "gradients" and SHOWS_AT not in found.cause:  # else a better line is known
            again = located(found, where, _NO_PLACEMENTS)
            report.relocate(found, replace(again, fix="to_local(grad_placements=[Partial()]), which adds up the parts"))


def _partial_gradient(record: Record) -> str | None:
    """The line of the first one, in the order of the backward pass."""
    ranks = [{event["number"]: event for event in rank.of("local_gradient")} for rank in record.ranks]
    apart = [
        number
        for number, one in ranks[0].items()
        if any(other.get(number, one)["of"] != one["of"] for other in ranks[1:])
    ]
    return ranks[0][apart[0]]["where"] if apart else None


def by_lines(runner: Runner, record: Record, steps: int, report: Report) -> None:
    """Looks for the lines that make the errors, by what they compute on the ranks and in one process."""
    if record.is_averaged_within or any(rank.of("hook", "compressed") for rank in record.ranks):
        return
    found_here = [one for one in report.errors if one.code in _LOCATED and not _is_by_own_pace(one)]
    wanted = {one.property: one for one in reversed(found_here)}
    for name, found in wanted.items():
        if name == "evaluation":
            trace, until = {"evaluations": _MOST_TRACED}, {"steps": steps, "passes": PASSES}
        elif found.step is not None and found.step < record.steps:
            window = record.ranks[0].steps[found.step]["window"]
            trace, until = {"window": window}, {"steps": found.step + 1}
            trace |= {} if are_loaded(record) else {"unloaded": True}
            trace |= {} if found.step else {"setup": True}
        else:
            continue
        ranks = runner.recorded(f"lines of {name} on {record.size} ranks", record.size, trace=trace, **until)
        alone = runner.alone(f"lines of {name}", ranks.record, trace=trace)
        if name == "evaluation" and not alone.rank.of("lines"):  # it evaluates with weights of its own
            alone = runner.recorded(f"lines of {name} of one process", 1, trace=trace, **until)
        report.relocate(found, Lines(ranks.record, alone).located(found))


def by_decisions(runner: Runner, record: Record, steps: int, report: Report) -> None:
    """Looks for the numbers by which ranks, or the ranks and one process, decide otherwise."""
    wanted = [
        one
        for one in report.errors
        if (one.code in _DECIDED and not one.cause.endswith(MOVED_APART)) or one.cause.endswith(storage.OWN_NUMBER)
    ]
    if not wanted:
        return
    how: dict[str, Any] = {"steps": steps, "passes": PASSES, "trace": {"path": True}}
    ranks = runner.recorded(f"decisions of {record.size} ranks", record.size, **how).record
    for found in [one for one in wanted if one.code == "steps-differ" and one.rank is None]:
        if _end_elsewhere(record, ranks):
            report.withdraw(found, unchecked(ENDS_ELSEWHERE), ENDS_ELSEWHERE)
            wanted.remove(found)
    between = {one.of: one for one in Paths.of_ranks(ranks)}
    with_one = functools.cache(
        lambda: Paths.with_one_process(ranks, runner.alone("decisions", ranks, trace={"path": True}).record)
    )
    for found in wanted:
        paths = between.get(f"rank {found.rank}")
        if found.rank is None:
            paths = with_one()
        until = None
        if found.code in {"parameters-diverged", "gradients-not-synchronised"} and found.property != "evaluation":
            until = record.ranks[0].steps[min(found.step or 0, record.steps - 1)]["window"] + 1
        is_unknown = found.cause.endswith(UNREACHED)
        if paths is not None and (found.code != "gradients-not-synchronised" or is_unknown or paths.part_for_good):
            report.relocate(found, paths.located(found, until))


def _end_elsewhere(record: Record, again: Record) -> bool:
    """Whether the ranks come to their own end in both recordings, after other numbers of steps."""
    return not (record.is_cut_short or again.is_cut_short) and record.steps != again.steps


def by_sources(runner: Runner, record: Record, steps: int, report: Report) -> None:
    """Looks for draws, hashes and writes by which ranks begin to differ."""
    known = (OWN_PART, samples.CHOSEN)  # by one process at its own pace
    of_samples = [
        one for one in report.errors if one.code in OF_SAMPLES and all(words not in one.cause for words in known)
    ]
    of_parameters = [one for one in report.errors if one.cause.endswith(OUTSIDE)]
    of_initial = [
        one
        for one in report.errors
        if one.code == "initial-state-differs"
        and not (record.has_no_group or one.cause.endswith((shards.OWN_MODEL, OWN_PART)))
    ]
    if not (of_samples or of_parameters or of_initial):
        return
    how: dict[str, Any] = {"steps": steps, "passes": PASSES, "trace": {"sources": True}}
    ranks = runner.recorded(f"draws, hashes and writes of {record.size} ranks", record.size, **how).record
    before, again = Report(ranks=record.size), Report(ranks=record.size)
    samples.judge(record, before)
    samples.judge(ranks, again)
    sources = Sources(ranks, are_alike=runner.fork_server is not None)
    is_found = any(one.code in OF_SAMPLES for one in again.errors)
    for found in of_samples:
        is_judged_again = (found.code, found.where) in {(one.code, one.where) for one in before.errors}
        report.relocate(found, sources.of_samples(found, still_found=is_found or not is_judged_again))
    for found in of_parameters:
        report.relocate(found, sources.of_parameters(found))
    for found in of_initial:
        report.relocate(found, sources.of_initial(found))


def by_samples(runner: Runner, record: Record, steps: int, report: Report) -> None:
    """Looks for the line that makes, or chooses, other samples than one process does, or carries on other values."""
    del steps
    first = record.ranks[0]
    for found in report.errors:
        step = first.steps[found.step] if found.step is not None and found.step < record.steps else None
        is_unloaded = found.code in OF_SAMPLES and not are_loaded(record)
        if step is None or not (_is_by_own_pace(found) or (is_unloaded and found.where == first.backward_of(step))):
            continue  # or a better line is known
        how = {"steps": step["event"] + 1, "trace": {"window": step["window"], "samples": True}}
        ranks = runner.recorded(f"samples of {record.size} ranks", record.size, **how).record
        alone = runner.recorded("samples of one process", 1, **how)
        report.relocate(found, Lines(ranks, alone).located(found, of_samples=True))
        return


def by_split(runner: Runner, record: Record, steps: int, report: Report) -> None:
    """Looks for the line at which samples are chosen, where no other run has told a better one."""
    del steps
    script = Path(runner.script.program)
    for found in report.errors if not runner.script.is_module else ():
        is_later = CARRIED_APART in found.cause or not found.cause.startswith("in epoch 0 ")
        if is_later and (found.code in OF_SAMPLES or CARRIED_APART in found.cause):
            known = split.of_kept(found, script)
            report.relocate(found, known)
            if known is not found:
                continue
        is_known = SHOWS_AT in found.cause or samples.OF_WORKERS in found.cause
        if found.code in OF_SAMPLES - {"datasets-differ"} and not is_known:
            report.relocate(found, split.of_samples(found, record, script))


def _is_by_own_pace(found: Finding) -> bool:
    """Whether one process that loads its samples by itself tells it, and not one that is given the ranks'."""
    return found.cause.endswith((OWN_PART, CARRIED_APART)) or found.cause.startswith(SAME_INPUTS)
