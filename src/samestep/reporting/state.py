"""What became of a run: how it ended, which ranks did not, and what else its directory holds."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Literal

from samestep.launch.verdict import PREEMPTED
from samestep.reporting.account import last
from samestep.reporting.analysis import RunAnalysis
from samestep.reporting.record import Event, RankLog
from samestep.text import escape_control, format_duration, join_and, plural, spans

__all__: list[str] = []

HANG = 124  # an exit code
_MOST_STANDING = 64  # ranks of which it is told what they were at
_QUIET, _LINES = 60.0, 5  # seconds without a line, and lines that would have fitted in: a run may be dead

Word = Literal["running", "ended", "failed"]


@dataclass(frozen=True)
class State:
    """In a word, and in sentences."""

    word: Word
    sentences: tuple[str, ...]


def state(analysis: RunAnalysis, now: float) -> State:
    """Returns what became of the run; `now` is in seconds since 1970."""
    about = analysis.run.about
    word = _word(analysis)
    told = [_first(analysis)]
    if word == "running":
        told.append(_running(analysis, now))
    elif about:
        told.append(_exit(about))
    told += [*_failure(about), *_hangs(analysis)]
    told += [*_ranks(analysis, over=word != "running"), *_others(analysis), *_foreign(analysis)]
    return State(word, tuple(told))


def _word(analysis: RunAnalysis) -> Word:
    about = analysis.run.about
    if not analysis.run.is_over:
        return "running"
    failed = about.get("exit") not in (0, None) or any(log.end and log.end["error"] for log in analysis.logs)
    return "failed" if failed and about.get("exit") != PREEMPTED else "ended"


def _first(analysis: RunAnalysis) -> str:
    hosts = list(dict.fromkeys(escape_control(log.begin.get("host", log.host)) for log in analysis.logs))
    where = f" on {join_and(hosts) if len(hosts) <= 4 else plural(len(hosts), 'host')}" if hosts else ""
    took = f" in {format_duration(analysis.account.wall)}" if analysis.steps else ""
    what = escape_control(program(analysis.run.about))
    return f"{what}, {plural(analysis.size, 'rank')}{where}: {plural(analysis.steps, 'step')}{took}."


def program(about: Event) -> str:
    """Returns the script or module that was run, as far as it is known."""
    command = about.get("command")
    return str(command[0]) if isinstance(command, list) and command else "A script"


def _running(analysis: RunAnalysis, now: float) -> str:
    heard = max((last(log) for log in analysis.logs), default=0.0)
    quiet = now - heard
    if heard and quiet > max(_QUIET, _LINES * _line(analysis)):
        return f"It is still running, or was killed with its launcher: the last line is {format_duration(quiet)} old."
    return "It is still running: this is what it has written by now."


def _line(analysis: RunAnalysis) -> float:
    """Seconds that a line takes; beyond the 10,000th step it stands for several."""
    table = analysis.table
    return analysis.account.usual * int(table.counts[-1]) if len(table) else 0.0


def _exit(about: Event) -> str:
    code = about.get("exit")
    meaning = {
        0: "",
        PREEMPTED: ": preempted, and saved",
        HANG: ": it hung, and was stopped",
        128 + signal.SIGINT: ": Ctrl-C",
        128 + signal.SIGTERM: ": it was told to end, and had saved nothing by then",
    }
    told = meaning.get(code, "") if isinstance(code, int) else ""
    return f"It ended with exit code {escape_control(code)}{told}."


def _hangs(analysis: RunAnalysis) -> Iterator[str]:
    """What the launcher has said of hangs: of those that ended the run the failure tells."""
    said = [one for one in analysis.run.said if one["kind"] in {"hang", "moves"} and one["attempt"] == analysis.number]
    for one, after in zip_longest(said, said[1:]):
        if one["kind"] == "hang" and analysis.run.about.get("exit") != HANG:
            first = escape_control(str(one["text"]).partition("\n")[0])
            moved = f"; {escape_control(after['text'])}" if after is not None and after["kind"] == "moves" else ""
            yield f"It hung: {first}{moved}."


def _failure(about: Event) -> Iterator[str]:
    failure = about.get("failure")
    if isinstance(failure, dict):
        said = [failure.get("exception"), failure.get("message")]
        what = (
            ": ".join(escape_control(each) for each in said if each)
            or f"signal {escape_control(failure.get('signal'))}"
        )
        where = f", at {escape_control(failure['where'])}" if failure.get("where") else ""
        yield f"Rank {escape_control(failure.get('rank'))} is to blame: {what}{where}."


def _ranks(analysis: RunAnalysis, *, over: bool) -> Iterator[str]:
    silent = [log.rank for log in analysis.logs if log.end is None] if over else []
    if silent:
        yield f"{_named(silent)} did not come to an end: killed, or stopped with the others."
    yield from (_standing(log) for log in analysis.logs[:_MOST_STANDING] if log.end is None and log.at)
    missing = sorted(set(range(min(analysis.size, 1 << 16))) - {log.rank for log in analysis.logs})
    if analysis.logs and missing:
        yield f"{_named(missing)} {'has' if len(missing) == 1 else 'have'} left no event."
    if not analysis.logs:
        yield "No rank has written an event: the script ended before its first step, or did not begin."
    few: dict[int, list[int]] = {}
    for rank, count in analysis.table.left_out.items():
        few.setdefault(count, []).append(rank)
    for count, ranks in few.items() if analysis.steps else ():
        be = "has" if len(ranks) == 1 else "have each", "is" if len(ranks) == 1 else "are"
        yield f"{_named(ranks)} {be[0]} taken {plural(count, 'step')} and {be[1]} not compared with the others."


def _standing(log: RankLog) -> str:
    """What a rank was at when it was last heard of, and had been for seconds."""
    call = (
        f" ({escape_control(log.at['operation'])} at {escape_control(log.at['site'])})" if log.at["operation"] else ""
    )
    return (
        f"Rank {log.rank} was last seen in its phase {escape_control(log.at['phase'])!r}{call}, for over two seconds."
    )


def _others(analysis: RunAnalysis) -> Iterator[str]:
    others = [number for number in analysis.run.attempts if number != analysis.number]
    if others:
        which = "the last" if analysis.number > others[-1] else "an earlier one"
        words = f"attempts {spans(others)}" if len(others) > 1 else f"attempt {others[0]}"
        yield f"This is attempt {analysis.number}, {which}; `--attempt` shows {words}."


def _foreign(analysis: RunAnalysis) -> Iterator[str]:
    if not analysis.steps:
        return
    lacking: dict[str, Any] = {
        "values": any(log.values for log in analysis.logs),
        "shares of the work": analysis.ledger,
        "buckets": analysis.overlap,
    }
    absent = [name for name, found in lacking.items() if not found]
    if absent and analysis.size > 1:
        yield f"The script tells nothing of {join_and(absent)}: what follows goes as far as can be seen from outside."


def _named(ranks: list[int]) -> str:
    return f"Ranks {spans(ranks)}" if len(ranks) > 1 else f"Rank {ranks[0]}"
