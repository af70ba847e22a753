"""What became of a run: its exit code, the failure that explains the others, the last lines on standard error.

A victim often notices before the culprit has ended, so the cause decides whom to blame, and time only among equals.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from samestep.launch.rank.failure import RPC_TIMEOUT, FailureRecord, one_line
from samestep.paths import rank_file
from samestep.text import plural, rank_list

DIFFERENT_COLLECTIVES = "the ranks were in unlike collectives"
MISMATCH = "distributed collective mismatch"  # in what gloo says before it aborts
LAST = 1 << 16  # bytes of a log in which its last line is looked for
MOST_PLACES = 4  # of ranks that were stopped; the logs and records have them all
PREEMPTED = 75  # EX_TEMPFAIL: start the same command again


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What became of a run of `size` ranks."""

    exit_code: int  # of the launcher
    size: int
    root_cause: FailureRecord | None = None  # the failure that explains the others
    same_failure: tuple[int, ...] = ()  # the ranks that failed in the very same way
    lost_peer_ranks: tuple[int, ...] = ()  # those that lost their connection to the culprit
    no_error_ranks: tuple[int, ...] = ()  # those that neither failed nor ended before the launcher stopped them
    interrupted: int | None = None  # the signal that ended the run from outside
    saved: tuple[int, str] | None = None  # the step and path of the checkpoint that it was preempted with
    save_timed_out: float | None = None  # the seconds in which it did not manage to save
    positions: Mapping[int, str] = field(default_factory=dict)  # where ranks were when they were stopped
    step: int = 0  # how many the furthest rank had finished
    steps_of_cause: int = 0  # how many the rank of the root cause had
    never_communicated: bool = False  # each rank has trained without ever meeting another
    failures: tuple[FailureRecord, ...] = ()  # all that were reported


def decide(
    codes: Mapping[int, int], failures: list[FailureRecord], finished: Mapping[int, int], interrupted: int | None
) -> RunResult:
    """Returns the result.

    `codes` are negative for a signal; `failures` are of ranks that failed by themselves; `finished` gives the process
    by rank, of those that had exited with code 0 before the first failure, in order.
    """
    size = len(codes)
    if not failures and PREEMPTED in codes.values() and set(codes.values()) <= {0, PREEMPTED}:
        return RunResult(exit_code=PREEMPTED, size=size, interrupted=interrupted)
    if interrupted is not None:
        handled = not any(codes.values())  # every rank ended in its own, orderly way
        return RunResult(exit_code=0 if handled else 128 + interrupted, size=size, interrupted=interrupted)
    cause = find_root_cause(failures, finished, size)
    if cause is None:
        return RunResult(exit_code=0, size=size)
    same = sorted((each for each in failures if _same(each, cause)), key=lambda failure: failure.rank)
    ranks = tuple(failure.rank for failure in same)
    first = same[0] if same else cause
    no_error = set(codes) - {failure.rank for failure in failures} - set(finished)
    lost = set(codes) - set(ranks) - set(finished) - {cause.rank} - (no_error if first.lost_peer else set())
    return RunResult(
        exit_code=first.exit_code,
        size=size,
        root_cause=first,
        same_failure=ranks,
        lost_peer_ranks=tuple(sorted(lost)),
        no_error_ranks=tuple(sorted(no_error)),
    )


def _same(one: FailureRecord, other: FailureRecord) -> bool:
    names = ("exception", "message", "where", "lost_peer")
    return all(getattr(one, name) == getattr(other, name) for name in names)


def find_root_cause(failures: list[FailureRecord], finished: Mapping[int, int], size: int) -> FailureRecord | None:
    """Returns the failure that explains the others, or None where no rank failed; arguments as in :func:`decide`."""
    if not failures:
        return None
    own = [failure for failure in failures if not failure.lost_peer]
    if own:  # SIGABRT without an exception comes last: gloo and NCCL abort innocent ranks too
        return min(own, key=lambda failure: (failure.signal == signal.SIGABRT and not failure.traceback, failure.time))
    first = min(failures, key=lambda failure: failure.time)
    if not finished or len(finished) == size:
        return first
    rank, pid = next(iter(finished.items()))
    waited = f"it ended with exit code 0 while others still waited for it (rank {first.rank} at {first.where})"
    return FailureRecord(
        rank=rank,
        pid=pid,
        host=first.host,
        time=first.time,
        kind="early_exit",
        exception="EarlyExit",
        message=waited,
        exit_code=1,
    )


def explain_gloo_abort(result: RunResult, logs: Path) -> RunResult:
    """Says what it means that a rank was aborted, where the backend has told so.

    gloo ends whoever gets a message of another size than it waits for: seldom the rank that left a collective out.
    """
    failure = result.root_cause
    if failure is None or failure.signal != signal.SIGABRT:
        return result
    if MISMATCH not in _end_of(rank_file(logs, failure.rank, "err")):
        return result
    message = (
        f"{DIFFERENT_COLLECTIVES}, and gloo aborted this one when it got another's message: every rank has to come by "
        "every collective, with tensors of one size; `samestep verify` says what each had called"
    )
    return replace(result, root_cause=replace(failure, kind="different_collectives", message=message))


_LOST_HOST = (
    "    `samestep doctor --hosts …` tells if it answers; a run with --restarts K --lost-host wait waits for it"
)

# --- in words -------------------------------------------------------------------------------------


def summary_lines(result: RunResult, logs: Path | None) -> list[str]:
    """Returns the last lines of standard error: the root cause first. Without logs it names none."""
    if result.exit_code == PREEMPTED and result.root_cause is None:
        by = "" if result.interrupted is None else f" by {signal.Signals(result.interrupted).name}"
        saved = "" if result.saved is None else f": step {result.saved[0]} is saved in {result.saved[1]}"
        lines = [f"samestep: preempted{by}{saved}; rerun the same command to resume (exit code {PREEMPTED})"]
    else:
        lines = _interruption(result) if result.interrupted is not None else _cause(result, logs)
    return lines if logs is None else [*lines, f"{'    ' if lines else 'samestep: '}logs: {logs}"]


def _interruption(result: RunResult) -> list[str]:
    assert result.interrupted is not None
    name = signal.Signals(result.interrupted).name
    ranks = "the rank has" if result.size == 1 else f"all {result.size} ranks have"
    lines = [f"samestep: interrupted by {name}: {ranks} ended"]
    if result.save_timed_out is not None:
        lines.append(
            f"    the step at hand was not saved within {result.save_timed_out:g} s: give it more with --grace"
        )
    return lines


def _cause(result: RunResult, logs: Path | None) -> list[str]:
    failure = result.root_cause
    if failure is None:
        return []
    unexplained = failure.lost_peer and not failure.usage
    lines = failure.traceback.rstrip().splitlines() if unexplained else []  # so far it has shown one line of it
    lines.append(f"samestep: error: {_headline(failure, result)}")
    if failure.exception in {"SystemExit", "Exit"} and logs is not None:  # its reason is what it printed
        printed = [line.strip() for line in _end_of(rank_file(logs, failure.rank, "err")).split("\n") if line.strip()]
        lines += [f"    its last line: {line}" for line in printed[-1:]]
    if failure.where is not None:
        lines.append(f"    at {failure.line}")
    positions = [] if failure.exception == "Hang" else _position_lines(result)
    hint = [_LOST_HOST] if failure.kind == "lost_host" else []
    return [*lines, f"    {_particulars(failure, result)}", *positions, *hint]


def _position_lines(result: RunResult) -> list[str]:
    """Where the others were, ranks of one place in one line; the places that most ranks share first."""
    places: dict[str, list[int]] = {}
    for rank, place in sorted(result.positions.items()):
        places.setdefault(place, []).append(rank)
    shown = sorted(places.items(), key=lambda item: (-len(item[1]), item[1]))[:MOST_PLACES]
    lines = [f"    {rank_list(ranks)} {'was' if len(ranks) == 1 else 'were'} at {place}" for place, ranks in shown]
    rest = len(places) - len(shown)
    return lines + ([f"    and others at {rest} more places"] if rest else [])


def _end_of(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - LAST))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _headline(failure: FailureRecord, result: RunResult) -> str:
    if failure.usage or failure.kind == "lost_host":
        return failure.message
    who = f"rank {failure.rank} of {result.size}"
    if result.size > 1 and len(result.same_failure) == result.size:
        who = f"all {result.size} ranks"
    if failure.lost_peer and RPC_TIMEOUT in failure.message:
        return f"{who} waited for a call of torch.distributed.rpc for too long: {one_line(failure.message)}"
    if failure.lost_peer:
        lost = "lost its connection to other ranks, and no rank reported a cause"
        return f"{who} {lost}: {one_line(failure.message)}"
    if failure.exception == "Hang":  # explained in full when it was found
        return f"the run hung and was stopped: {failure.message.partition(';')[0]}"
    what = f"{failure.exception}: {failure.message}".rstrip(": ")
    if failure.exception == "SystemExit":
        what = f"exit code {failure.exit_code}"
    elif failure.kind != "exception":
        what = failure.message
    return f"{who} failed: {what}"


def _particulars(failure: FailureRecord, result: RunResult) -> str:
    code = f"exit code {result.exit_code}"
    if failure.kind == "early_exit":
        code = f"exit code 0, and {result.exit_code} of the run"
    who = f"rank {failure.rank}, host {failure.host}, process {failure.pid}, "
    text = code if failure.kind == "lost_host" else f"{who}{code}"
    if result.steps_of_cause:
        text += f", after {plural(result.steps_of_cause, 'step')}"
    others = [rank for rank in result.same_failure if rank != failure.rank]
    if others:
        text += f"; {rank_list(others)} failed the same way"
    if result.lost_peer_ranks:
        one = len(result.lost_peer_ranks) == 1
        did = f"lost {'its' if one else 'their'} connection to it"
        if failure.exception == "Hang":
            did = f"{'was' if one else 'were'} waiting {'too' if failure.kind == 'deadlock' else 'for it'}"
        text += f"; {rank_list(result.lost_peer_ranks)} {did}"
    if failure.lost_peer and result.no_error_ranks:
        text += f"; {rank_list(result.no_error_ranks)} had not failed when stopped: look there first"
    return text
