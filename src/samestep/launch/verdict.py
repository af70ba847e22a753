"""What became of a run: its exit code, the rank to blame, and the last lines on standard error."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from samestep.launch.failure import FailureRecord, one_line, root_cause
from samestep.paths import rank_file
from samestep.text import rank_list

__all__: list[str] = []

DIFFERENT_COLLECTIVES = "the ranks were in unlike collectives"
MISMATCH = "distributed collective mismatch"  # in what gloo says before it aborts
LAST = 1 << 16  # bytes of a log in which its last line is looked for
MOST_PLACES = 4  # of ranks that were stopped; the logs and records have them all


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What became of a run of `size` ranks.

    `blamed` is the failure that explains the others, `alike` the ranks that failed in the very same way, `waiting`
    those that lost their connection to it, `silent` those that neither failed nor ended before the launcher stopped
    them; `interrupted` is the signal that ended the run from outside, `saved` the step and path of the checkpoint
    that it was preempted with, or `overdue` the seconds in which it did not manage to; `standing` says where ranks
    stood when they were stopped, `step` how many steps the furthest had finished and `after` how many the blamed,
    `apart` that each rank has trained without ever meeting another, `lost` which hosts are gone, `failures` all that
    were heard of.
    """

    exit_code: int
    size: int
    blamed: FailureRecord | None = None
    alike: tuple[int, ...] = ()
    waiting: tuple[int, ...] = ()
    silent: tuple[int, ...] = ()
    interrupted: int | None = None
    saved: tuple[int, str] | None = None
    overdue: float | None = None
    standing: Mapping[int, str] = field(default_factory=dict)
    step: int = 0
    after: int = 0
    apart: bool = False
    lost: tuple[str, ...] = ()
    failures: tuple[FailureRecord, ...] = ()


MUTUAL = "the ranks wait in different collectives, each for the others"  # so none is known to be the culprit
PREEMPTED = 75  # EX_TEMPFAIL: start the same command again


def judge(
    codes: Mapping[int, int], failures: list[FailureRecord], finished: Mapping[int, int], interrupted: int | None
) -> RunResult:
    """Returns the verdict.

    Args:
        codes: every rank's exit code, negative for a signal.
        failures: of the ranks that failed by themselves.
        finished: process by rank, of those that had exited with code 0 before the first failure, in order.
        interrupted: the signal that the launcher received, if it did.
    """
    size = len(codes)
    if not failures and PREEMPTED in codes.values() and set(codes.values()) <= {0, PREEMPTED}:
        return RunResult(exit_code=PREEMPTED, size=size, interrupted=interrupted)
    if interrupted is not None:
        handled = not any(codes.values())  # every rank ended in its own, orderly way
        return RunResult(exit_code=0 if handled else 128 + interrupted, size=size, interrupted=interrupted)
    blamed = root_cause(failures, finished, size)
    if blamed is None:
        return RunResult(exit_code=0, size=size)
    alike = sorted((f for f in failures if _same(f, blamed)), key=lambda failure: failure.rank)
    ranks = tuple(failure.rank for failure in alike)
    first = alike[0] if alike else blamed
    silent = set(codes) - {failure.rank for failure in failures} - set(finished)
    waiting = set(codes) - set(ranks) - set(finished) - {blamed.rank} - (silent if first.lost_peer else set())
    return RunResult(
        exit_code=first.exit_code,
        size=size,
        blamed=first,
        alike=ranks,
        waiting=tuple(sorted(waiting)),
        silent=tuple(sorted(silent)),
    )


def _same(one: FailureRecord, other: FailureRecord) -> bool:
    told = ("exception", "message", "where", "lost_peer")
    return all(getattr(one, name) == getattr(other, name) for name in told)


def summary_lines(verdict: RunResult, logs: Path | None) -> list[str]:
    """Returns the last lines of standard error: the root cause first. Without logs it names none."""
    if verdict.exit_code == PREEMPTED and verdict.blamed is None:
        lines = _preemption(verdict)
    else:
        lines = _interruption(verdict) if verdict.interrupted is not None else _cause(verdict, logs)
    return lines if logs is None else [*lines, f"{'    ' if lines else 'samestep: '}logs: {logs}"]


def _interruption(verdict: RunResult) -> list[str]:
    assert verdict.interrupted is not None
    name = signal.Signals(verdict.interrupted).name
    ranks = "the rank has" if verdict.size == 1 else f"all {verdict.size} ranks have"
    lines = [f"samestep: interrupted by {name}: {ranks} ended"]
    if verdict.overdue is not None:
        lines.append(f"    the step at hand was not saved within {verdict.overdue:g} s: give it more with --grace")
    return lines


def _preemption(verdict: RunResult) -> list[str]:
    by = "" if verdict.interrupted is None else f" by {signal.Signals(verdict.interrupted).name}"
    saved = "" if verdict.saved is None else f": step {verdict.saved[0]} is saved in {verdict.saved[1]}"
    return [f"samestep: preempted{by}{saved}; rerun the same command to resume (exit code {PREEMPTED})"]


def _cause(verdict: RunResult, logs: Path | None) -> list[str]:
    failure = verdict.blamed
    if failure is None:
        return []
    unexplained = failure.lost_peer and not failure.usage
    lines = failure.traceback.rstrip().splitlines() if unexplained else []  # so far it has shown one line of it
    lines.append(f"samestep: error: {_headline(failure, verdict)}")
    if failure.exception in {"SystemExit", "Exit"} and logs is not None:  # its reason is what it printed
        lines += [f"    its last line: {said}" for said in _last_line(rank_file(logs, failure.rank, "err"))]
    if failure.where is not None:
        lines.append(f"    at {failure.where}  {failure.source or ''}".rstrip())
    positions = [] if failure.exception == "Hang" else _standing(verdict)
    return [*lines, f"    {_particulars(failure, verdict)}", *positions]


def _standing(verdict: RunResult) -> list[str]:
    """Where the others stood, ranks of one place in one line; the places that most ranks share first."""
    places: dict[str, list[int]] = {}
    for rank, place in sorted(verdict.standing.items()):
        places.setdefault(place, []).append(rank)
    shown = sorted(places.items(), key=lambda item: (-len(item[1]), item[1]))[:MOST_PLACES]
    lines = [f"    {rank_list(ranks)} {'was' if len(ranks) == 1 else 'were'} at {place}" for place, ranks in shown]
    rest = len(places) - len(shown)
    return lines + ([f"    and others at {rest} more places"] if rest else [])


def understood(verdict: RunResult, logs: Path) -> RunResult:
    """Says what it means that a rank was aborted, where the backend has told so.

    gloo ends whoever gets a message of another size than it waits for: seldom the rank that left a collective out.
    """
    failure = verdict.blamed
    if failure is None or failure.signal != signal.SIGABRT:
        return verdict
    if MISMATCH not in _end(rank_file(logs, failure.rank, "err")):
        return verdict
    message = (
        f"{DIFFERENT_COLLECTIVES}, and gloo aborted this one when it got another's message: every rank has to come by "
        "every collective, with tensors of one size; `samestep verify` says what each had called"
    )
    return replace(verdict, blamed=replace(failure, message=message))


def _last_line(log: Path) -> list[str]:
    """Returns the last line of a log that says something, if one does."""
    return [line.strip() for line in _end(log).split("\n") if line.strip()][-1:]


def _end(log: Path) -> str:
    """Returns the end of a log."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - LAST))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _headline(failure: FailureRecord, verdict: RunResult) -> str:
    if failure.usage:
        return failure.message
    if failure.lost_peer:
        lost = "lost its connection to other ranks, and no rank reported a cause"
        return f"{_who(failure, verdict)} {lost}: {one_line(failure.message)}"
    if failure.exception == "Hang":  # explained in full when it was found
        return f"the run hung and was stopped: {failure.message.partition(':')[0]}"
    what = f"{failure.exception}: {failure.message}".rstrip(": ")
    if failure.exception == "SystemExit":
        what = f"exit code {failure.exit_code}"
    elif failure.exception in {"Exit", "EarlyExit", "Signal", "HostLost"}:
        what = failure.message
    return f"{_who(failure, verdict)} failed: {what}"


def _who(failure: FailureRecord, verdict: RunResult) -> str:
    if verdict.size > 1 and len(verdict.alike) == verdict.size:
        return f"all {verdict.size} ranks"
    return f"rank {failure.rank} of {verdict.size}"


def _particulars(failure: FailureRecord, verdict: RunResult) -> str:
    code = f"exit code {verdict.exit_code}"
    if failure.exception == "EarlyExit":
        code = f"exit code 0, and {verdict.exit_code} of the run"
    text = f"rank {failure.rank}, host {failure.host}, process {failure.pid}, {code}"
    if verdict.after:
        text += f", after {verdict.after} {'step' if verdict.after == 1 else 'steps'}"
    others = [rank for rank in verdict.alike if rank != failure.rank]
    if others:
        text += f"; {rank_list(others)} failed the same way"
    if verdict.waiting:
        one = len(verdict.waiting) == 1
        did = f"lost {'its' if one else 'their'} connection to it"
        if failure.exception == "Hang":
            did = f"{'was' if one else 'were'} waiting {'too' if MUTUAL in failure.message else 'for it'}"
        text += f"; {rank_list(verdict.waiting)} {did}"
    if failure.lost_peer and verdict.silent:
        text += f"; {rank_list(verdict.silent)} had not failed when stopped: look there first"
    return text
