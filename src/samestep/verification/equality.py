"""What holds for scripts that use samestep, beyond what is asked of any script: the equality that it promises.

meaning          N ranks in float64 beside one process in float64, whose rounding is a billion times smaller
implementation   N ranks and one process, both as N virtual ranks: every bit of every gradient and parameter,
through dropout, at every step
resume           one rank killed (kill -9) behind a save; what resumes goes on with the bits of the run that was not
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from samestep.verification.findings import AGREES, DECLARED, PROVED, Finding, unchecked
from samestep.verification.journal import Event
from samestep.verification.judging.others import Others
from samestep.verification.judging.record import Record
from samestep.verification.judging.reference import Comparison
from samestep.verification.judging.single import Run
from samestep.verification.judging.words import plural
from samestep.verification.report import Report
from samestep.verification.runner import Runner

__all__: list[str] = []

MOST_STEPS = 20  # of the runs that are made here
MOST_TEXT = 500  # characters of a message


def judge(runner: Runner, record: Record, report: Report) -> None:
    """Adds what these claims come to, where the script uses samestep and nothing has been found against it."""
    called = [event for rank in record.ranks for event in rank.of("called")]
    used, saves = {event["name"] for event in called}, any(event["saves"] for event in called)
    if report.errors or not {"shards", "replicate"} <= used or not record.steps:
        return
    steps = min(record.asked, MOST_STEPS)
    if any(rank.of("compresses") for rank in record.ranks):
        report.remarks.append("in float64, and as virtual ranks, gradients are not compressed")
    if any(rank.of("local_steps") for rank in record.ranks):
        report.remarks.append("in float64, and as virtual ranks, gradients are averaged at every step")
    in_float64(runner, steps, report)
    if not report.errors:
        bit_for_bit(runner, record.size, steps, report)
    if not report.errors and saves:
        resumed(runner, record, report)


# --- meaning ----------------------------------------------------------------------------------------


def in_float64(runner: Runner, steps: int, report: Report) -> None:
    """Compares the ranks with one process, both in float64."""
    ranks = runner.recorded(f"recording {runner.ranks} ranks in float64", runner.ranks, steps=steps, double=True)
    whole = runner.alone("in float64", ranks.record, double=True)
    if reason := failed(ranks) or failed(whole):
        report.remarks.append(f"not compared in float64: {reason}")
        return
    found = Report(ranks=report.ranks, steps=ranks.record.steps)

    def permuted() -> Run:
        return runner.alone("in float64, another order", ranks.record, double=True, permuted=True)

    def of_ranks() -> list[Run]:
        return [
            runner.alone(f"in float64, samples of rank {one.number}", ranks.record, [one.number], double=True)
            for one in ranks.record.ranks
        ]

    def own_lengths() -> Run:
        return runner.alone("in float64, with lengths of its own", ranks.record, double=True, own_lengths=True)

    Comparison(ranks.record, whole, Others(permuted, of_ranks, own_lengths=own_lengths)).judge(found)
    report.add(found.errors)
    if found.coverage.get("gradients") in {AGREES, DECLARED}:
        report.remarks.append(f"in float64 ranks and one process agree: {found.margins['gradients']}")
    elif not found.errors:
        report.remarks.append(f"not compared in float64: {found.coverage.get('gradients')}")


def failed(run: Run) -> str | None:
    """Why a run did not come to its steps."""
    if run.ended.hung:
        return "nothing moved any more"
    failure = run.ended.failure
    if failure is not None:
        message = failure["message"]  # its end says what to do, mostly
        return f"{failure['exception']}: {message if len(message) <= MOST_TEXT else f'{message[:MOST_TEXT]}…'}"
    return None if run.record.ranks and run.record.steps else "no step was seen"


# --- implementation ---------------------------------------------------------------------------------


def bit_for_bit(runner: Runner, size: int, steps: int, report: Report) -> None:
    """Compares so many processes with one, both as virtual ranks."""
    if size & (size - 1):
        report.remarks.append(f"not compared bit for bit with virtual ranks: {size} is no power of two")
        return
    order: dict[str, Any] = {"steps": steps, "virtual_ranks": size, "chance": True}
    many = runner.recorded(f"{size} ranks as {size} virtual ranks", size, **order)
    one = runner.recorded(f"one process as {size} virtual ranks", 1, **order)
    if reason := failed(many) or failed(one):
        report.remarks.append(f"not compared bit for bit with virtual ranks: {reason}")
        return
    found = next(differences(many.record.ranks[0].steps, one.record.ranks[0].steps), None)
    if found is not None:
        step, tensor = found
        cause = f"as {size} virtual ranks, {size} processes and one have other bits in {tensor} at step {step}"
        report.add([Finding(code="gradient-differs", step=step, tensor=tensor, cause=cause)])
        return
    count = min(many.record.steps, one.record.steps)
    report.remarks.append(
        f"as {size} virtual ranks, {size} processes and one have the same bits in all gradients and parameters "
        f"({plural(count, 'step')}, with the script's own dropout)"
    )


def differences(these: list[Event], others: list[Event]) -> Iterator[tuple[int, str]]:
    """Yields step and tensor where two runs have other gradients, or parameters before or after a step."""
    for mine, theirs in zip(these, others, strict=False):
        for key in ("parameters", "gradients", "after"):
            here, there = mine[key] or {}, theirs[key] or {}
            for name in here:
                if name in there and here[name] != there[name]:
                    yield mine["event"], name


# --- resume -----------------------------------------------------------------------------------------


def resumed(runner: Runner, record: Record, report: Report) -> None:
    """Kills a rank once something is saved, and lets the same ranks go on from there."""
    size, asked = record.size, record.asked
    killed_at = max(2, asked // 2)
    order: dict[str, Any] = {"every": max(1, asked // 4), "saves": str(runner.folder / "resumed")}
    if size > 2:  # two numbers have one sum; the order of three shows in its bits
        order["ordered"] = True
        record = runner.recorded("not killed, added in rank order", size, steps=asked, ordered=True).record
    whole = record.ranks[0].steps[:asked] if record.ranks else []
    killed = runner.recorded("rank 0 killed after a save", size, killed_at=killed_at, **order)
    if not any(rank.of("killed") for rank in killed.record.ranks):  # it has ended, or something else has ended it
        why = failed(killed) or "the training ended before a checkpoint was complete"
        report.cover("checkpoint", unchecked(why))
        return
    run = runner.recorded("resuming", size, steps=asked, **order)
    if not run.record.ranks or not run.record.ranks[0].steps:
        report.cover("checkpoint", unchecked(f"nothing was trained after the resume: {failed(run)}"))
        return
    steps = run.record.ranks[0].steps
    begun = next((step["event"] for step in whole if not [*differences([step | _BEFORE], [steps[0] | _BEFORE])]), None)
    last = killed.record.steps
    if not begun:
        where = "at the beginning" if begun == 0 else "from parameters that the run which was not killed never had"
        cause = f"rank 0 was killed behind step {last}, after a save, and the run resumed {where}"
        report.add([Finding(code="checkpoint-inexact", step=last, cause=cause)])
        return
    found = next(differences(whole[begun:], steps), None)
    if found is not None:
        cause = (
            f"resumed before step {begun}, the run has other bits in {found[1]} at step {found[0]} than without a stop"
        )
        report.add([Finding(code="checkpoint-inexact", step=found[0], tensor=found[1], cause=cause)])
        return
    end = min(len(whole), begun + len(steps)) - 1
    report.cover("checkpoint", PROVED)
    report.margins["checkpoint"] = (
        f"rank 0 killed behind step {last}; resumed before step {begun}, the same bits to step {end}"
    )


_BEFORE: dict[str, Any] = {
    "gradients": {},
    "after": {},
}  # what does not count where only the parameters before a step do
