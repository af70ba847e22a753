"""Says what a run that ended badly was: a difference, unless it ends so alone too, or the machine did it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from samestep.launch.result import DIFFERENT_COLLECTIVES
from samestep.verification import machine, runs
from samestep.verification.findings import Finding, unchecked
from samestep.verification.judging import communication
from samestep.verification.judging.passes import are_loaded
from samestep.verification.judging.record import Record, Run
from samestep.verification.report import Report

_NOTHING_WAITS = (
    "no rank has made progress for so long that the run was ended, and none waits for anything that was seen: the "
    "machine may be too busy; allow more with --timeout"
)
_AS_MANY = "let every rank come by every collective, as often as the others: samestep.shards gives all as many batches"


def ended_alone(recorded: Run) -> int | None:
    """Returns a rank whose recording has ended while others waited for it: it trains a model by itself, say."""
    over = [(rank.number, rank.ended is not None and rank.ended["enough"]) for rank in recorded.record.ranks]
    first = next((number for number, is_over in over if is_over), None)
    return first if recorded.has_failed and not all(is_over for _, is_over in over) else None


def blame(recorded: Run, whole: Run, run_at_own_pace: Callable[[], Run], report: Report) -> None:
    """Says what a run that ended badly was: a difference, unless it ends so alone too, or the machine did it."""
    ended, record, alone = recorded.ended, recorded.record, whole.ended
    if (rank := ended_alone(recorded)) is not None:
        report.inconclusive = f"rank {rank} takes steps by itself, while others wait for it; ask for more with --steps"
        return
    if (fault := machine.recorder_fault(ended) or machine.recorder_fault(alone)) is not None:
        report.inconclusive = fault
        return
    if whole.has_failed:
        where = f", at {alone.failure['where']}" if alone.failure and alone.failure.get("where") else ""
        report.inconclusive = f"the script fails alone too{where}: {reason_of(alone)}"
        return
    if (why := None if ended.hung else machine.to_blame(ended)) is not None:
        report.inconclusive = why
        return
    if not ended.hung and are_loaded(record):  # one process was given the ranks' samples, and has loaded none
        again = run_at_own_pace()
        if again.has_failed and reason_of(again.ended) == reason_of(ended):
            report.inconclusive = f"the script fails alone too, where it loads its samples itself: {reason_of(ended)}"
            return
    found = communication.stuck(record) if ended.hung else _crash(ended, record)
    is_known = found.where is not None or found.rank is not None
    if ended.hung and not is_known:
        report.inconclusive = _NOTHING_WAITS
        return
    report.add([found])
    report.cover("communication", unchecked("the run broke off, and what came behind was not seen"))


def reason_of(ended: runs.Ended) -> str:
    if ended.hung:
        return "no rank makes progress"
    failure = ended.failure
    if failure is None:
        return ended.tail(1)
    said = re.search(r"its last line: (.+)", ended.tail())  # of a rank that has ended itself the launcher quotes it
    if failure["exception"] == "SystemExit" and said:
        return f"exit code {ended.code}: {said[1]}"
    return f"{failure['exception']}: {failure['message'][:300]}"


def _crash(ended: runs.Ended, record: Record) -> Finding:
    failure = ended.failure or {}
    if str(failure.get("message", "")).startswith(DIFFERENT_COLLECTIVES):
        return _unlike(ended, failure)
    busy = communication.waited_for(record, failure.get("rank"), failure.get("where"))
    return Finding(
        code="crash",
        rank=failure.get("rank"),
        where=busy[0] if busy else failure.get("where") or _where_others_waited(failure),
        cause=f"{reason_of(ended)}{busy[1] if busy else ''}; alone, the script ends well",
        fix=_AS_MANY if failure.get("exception") == "EarlyExit" else None,
    )


def _unlike(ended: runs.Ended, failure: dict[str, Any]) -> Finding:
    stood = [f"rank {rank} in {place}" for rank, place in sorted(runs.failure_positions(ended.folder).items())]
    where = f" ({'; '.join(stood)})" if stood else ""
    return Finding(
        code="collective-mismatch",
        rank=failure.get("rank"),
        where=failure.get("where"),
        cause=f"{DIFFERENT_COLLECTIVES} when the run broke off{where}: one has more batches, or calls, than another, "
        "or tensors of another size; alone, the script ends well",
        fix=_AS_MANY,
    )


def _where_others_waited(failure: dict[str, Any]) -> str | None:
    """The line at which the launcher saw another rank wait for the one that has gone."""
    found = re.search(r"rank \d+ at (\S+:\d+)", str(failure.get("message", "")))
    return found[1] if found else None
