"""How a run stands and what each rank is at, for the report and for the live view; what --check has found."""

from __future__ import annotations

import shlex
import signal
import socket
import struct
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Literal

from samestep import progress
from samestep.events import LOST_PEERS
from samestep.launch.result import PREEMPTED
from samestep.paths import rank_file
from samestep.reporting.run_log import Event, RankLog, RecentSteps, Run, last, measured, recent_steps
from samestep.text import (
    escape_control,
    escape_lines,
    format_bytes,
    format_duration,
    format_elapsed,
    join_and,
    plural,
    rank_list,
    spans,
)

if TYPE_CHECKING:
    from samestep.reporting.analysis import RunAnalysis


Level = Literal["", "dim", "good", "warn", "bad"]
QUIET = 2.0  # seconds without a step that need no word
MANY = 5  # lines of steps that would have fitted in, likewise
SILENT = 60.0  # seconds without any event after which a run may have been killed with its launcher
DOING = {"train": "computing", "data": "waiting for data", "wait": "waiting for others", "optimizer": "stepping"}
DOING |= {"evaluate": "evaluating", "save": "saving", "load": "loading"}
_MOST_RANKS = 1 << 14  # rows of ranks that have written nothing; a changed file may tell of any number


@dataclass(frozen=True)
class RankStatus:
    text: str
    level: Level = ""


ENDED = {0: RankStatus("finished", "good"), PREEMPTED: RankStatus("preempted, and saved", "warn")}  # by exit code


@dataclass(frozen=True)
class RunEvent:
    """Something that happened to the run: when, of what kind, and in how many lines it may be told."""

    kind: str
    text: str
    level: Level = ""
    at: float | None = None
    ranks: tuple[int, ...] = ()

    @property
    def clock(self) -> str:
        """When it was, by the clock on the wall; blank where nobody knows."""
        return " " * 8 if self.at is None else time.strftime("%H:%M:%S", time.localtime(self.at))


@dataclass(frozen=True)
class LauncherState:
    """What the launcher's events come to by now."""

    slow: frozenset[int] = frozenset()
    missing: frozenset[int] = field(default=frozenset())  # whom the others wait for in vain
    hangs: bool = False


def launcher_state(run: Run, attempt: int) -> LauncherState:
    """Returns what the launcher has said of an attempt, as far as it still holds."""
    slow: set[int] = set()
    missing: frozenset[int] = frozenset()
    hangs = False
    for event in run.launcher_events:
        if event["attempt"] != attempt:
            continue
        if event["kind"] == "straggler":
            slow.update(event["ranks"])
        elif event["kind"] == "keeps-up":
            slow.difference_update(event["ranks"])
        elif event["kind"] in {"hang", "moves"}:
            hangs = event["kind"] == "hang"
            missing = frozenset(event["ranks"] if hangs else ())
    return LauncherState(frozenset(slow), missing, hangs)


def ranks_of(run: Run, attempt: int) -> list[int]:
    """Returns all ranks that an attempt has, those that have not said anything too."""
    known = {rank for number, rank in run.ranks if number == attempt}
    sizes = [log.begin.get("size") for log in run.attempt(attempt)] + [run.about.get("ranks")]
    size = max((each for each in sizes if isinstance(each, int)), default=0)
    return sorted(known | set(range(min(size, _MOST_RANKS))))


# --- a rank -----------------------------------------------------------------------------------------


def rank_status(
    log: RankLog | None, pace: RecentSteps, launcher: LauncherState, now: float, *, is_over: bool
) -> RankStatus:
    """Returns what a rank is at; `is_over` says that its attempt is."""
    if log is None:
        return RankStatus("has not begun" if not is_over else "did not begin", "dim")
    if log.end is not None:
        return _ended(log.end["error"])
    if is_over:
        return RankStatus("was ended", "warn")
    at = _at(log, pace, now)
    if log.rank in launcher.missing:
        return RankStatus(f"stuck for {short_duration(now - last_sign(log))}", "bad")
    if log.rank in launcher.slow:
        return RankStatus(f"slow{at and ': '}{at}", "warn")
    return RankStatus(at, "warn" if launcher.hangs else "")


def _ended(error: str | None) -> RankStatus:
    if error is None:
        return RankStatus("finished", "good")
    if error.startswith(LOST_PEERS):
        return RankStatus(LOST_PEERS, "warn")
    return RankStatus(escape_control(error.rstrip(": ")), "bad")


def _at(log: RankLog, pace: RecentSteps, now: float) -> str:
    at = _noted(log) or _long_call(log, now)
    if at:
        return at
    since = last_sign(log)
    quiet = max(0.0, now - since) if since else 0.0
    if not log.steps:
        return f"no step yet, {short_duration(quiet)}" if quiet > QUIET else "no step yet"
    if quiet > max(QUIET, _many_lines(log, pace)):
        return f"no step for {short_duration(quiet)}"
    outside_training = [name for name in ("evaluate", "save", "load") if pace.spent.get(name)]
    return {"evaluate": "evaluated", "save": "saved", "load": "loaded"}[outside_training[0]] if outside_training else ""


def _many_lines(log: RankLog, pace: RecentSteps) -> float:
    """Seconds in which a rank that goes on writes MANY lines; beyond the 10,000th step a line stands for several."""
    return MANY * pace.seconds * max(1.0, measured(log.steps[-1]["steps"])) if log.steps else 0.0


def _long_call(log: RankLog, now: float) -> str:
    """What the rank itself has told of a piece of a step that has lasted for long, and goes on."""
    if not log.at:
        return ""
    name = log.at["operation"] or DOING.get(log.at["phase"], log.at["phase"])
    where = f" at {log.at['site']}" if log.at["site"] else ""
    return escape_control(f"{name} for {short_duration(now - log.at['t'] + log.clock_offset)}{where}")


def _noted(log: RankLog) -> str:
    """What the rank's progress record says, where it lies in a file of this host."""
    if log.begin.get("host") != socket.gethostname():
        return ""
    try:
        record = progress.read_file(rank_file(log.folder, log.rank, "progress"))
    except (OSError, struct.error):
        return ""
    return escape_control(record)


def last_sign(log: RankLog) -> float:
    """Returns when a rank was last known to be alive, by this host's clock."""
    heard = measured(last(log))
    return heard - log.clock_offset if heard else 0.0


def short_duration(seconds: float) -> str:
    """Returns a time in its largest unit: there is little room.

    >>> short_duration(59.9), short_duration(179), short_duration(7300)
    ('59 s', '2 min', '2 h')
    """
    return " ".join(format_elapsed(max(0.0, seconds)).split()[:2])


# --- the run ------------------------------------------------------------------------------------------


def run_status(run: Run, launcher: LauncherState, now: float) -> RankStatus:
    if run.is_over:
        code = run.about.get("exit")
        if not run.about:
            failed = any(log.end is not None and log.end["error"] is not None for log in run.ranks.values())
            return RankStatus("failed", "bad") if failed else RankStatus("finished", "good")
        known = ENDED.get(code) if isinstance(code, int) else None
        return known or RankStatus(f"failed, exit code {escape_control(code)}", "bad")
    if launcher.hangs:
        return RankStatus("hangs", "bad")
    if quiet := _silence(run.ranks.values(), now):
        return RankStatus(f"running? silent for {short_duration(quiet)}", "warn")
    return RankStatus("running", "good")


def _silence(logs: Iterable[RankLog], now: float) -> float:
    """Seconds since the last sign of any rank, where one would have come from a run that goes on; else 0."""
    quiet = now - max(filter(None, map(last_sign, logs)), default=now)
    return quiet if quiet > max([SILENT, *(_many_lines(log, recent_steps(log)) for log in logs)]) else 0.0


def took(run: Run, now: float) -> float:
    begins = [measured(log.begin.get("t")) for log in run.ranks.values() if log.begin]
    began = measured(run.about.get("began")) or min(begins, default=now)
    ended = measured(run.about.get("ended"))
    if run.is_over and not ended:
        ended = max(map(last_sign, run.ranks.values()), default=now)
    return max(0.0, (ended or now) - began)


def blamed(run: Run) -> int | None:
    found = run.about.get("failure")
    rank = found.get("rank") if isinstance(found, dict) else None
    return rank if isinstance(rank, int) else None


def failure(run: Run) -> str:
    """Returns why the run failed, in a line; "" where it did not."""
    found = run.about.get("failure")
    if not isinstance(found, dict):
        return ""
    return f"rank {_text(found.get('rank'))} on {_text(found.get('host'))}: {_cause(found, 'ended by signal')}"


def _cause(failure: Event, by_signal: str) -> str:
    what = ": ".join(_text(failure[key]) for key in ("exception", "message") if failure.get(key))
    if not what and failure.get("signal"):
        what = f"{by_signal} {_text(failure['signal'])}"
    where = f", at {_text(failure['where'])}" if failure.get("where") else ""
    return f"{what or 'failed'}{where}"


def run_events(run: Run) -> list[RunEvent]:
    """Returns what has happened, in its order; what has no time comes last."""
    timed = [*_from_launcher(run), *_saved(run)]
    timed.sort(key=lambda each: each.at or 0.0)
    problems = [RunEvent("note", escape_control(problem), "warn") for problem in run.problems]
    return [*timed, *map(_finding, run.findings), *problems]


def _from_launcher(run: Run) -> Iterator[RunEvent]:
    levels: dict[str, Level] = {"hang": "bad", "restart": "bad", "straggler": "warn", "network": "warn"}
    levels |= {"moves": "good", "keeps-up": "good"}
    for event in run.launcher_events:
        if event["kind"] in levels:
            kind, text = event["kind"], escape_lines(event["text"])
            yield RunEvent(kind, text, levels[kind], measured(event["t"]), tuple(event["ranks"]))


def _saved(run: Run) -> Iterator[RunEvent]:
    """Yields the last checkpoint: all of them would leave no room."""
    saves = [event for log in run.ranks.values() for event in log.checkpoints]
    if saves:
        last = max(saves, key=lambda event: measured(event["t"]))
        reason = f", {escape_control(last['reason'])}" if last["reason"] else ""
        size = format_bytes(measured(last["bytes"]))
        text = f"step {last['step']:,}, {size}{reason}: {escape_control(last['path'])}"
        yield RunEvent("saved", text, "dim", measured(last["t"]))


def _finding(found: Event) -> RunEvent:
    level: Level = "bad" if found.get("severity") == "error" else "dim"
    place = "".join(f", {key} {_text(found[key])}" for key in ("rank", "step") if found.get(key) is not None)
    where = f" at {_text(found['where'])}" if found.get("where") else ""
    text = f"{_text(found.get('code'))}{place}{where}: {_text(found.get('cause'))}"
    fix = f"\n{escape_lines(found['fix'])}" if found.get("fix") else ""
    rank = found.get("rank")
    return RunEvent("finding", text + fix, level, ranks=(rank,) if isinstance(rank, int) else ())


def _text(value: Any) -> str:
    return "?" if value is None else escape_control(value)


MOST_RANKS = 8  # that are started for a proof on one machine


@dataclass(frozen=True)
class CheckVerdict:
    verdict: Literal["different", "agrees", "unchecked"]  # in a word
    sentence: str  # in one
    command: str  # that would say more


def check_verdict(run: Run) -> CheckVerdict:
    command = verify_command(run.about)
    errors = [finding for finding in run.findings if finding.get("severity") == "error"]
    notes = len(run.findings) - len(errors)
    if errors:
        codes = join_and(list(dict.fromkeys(escape_control(each.get("code")) for each in errors)))
        return CheckVerdict("different", f"No: --check found {plural(len(errors), 'error')} ({codes}).", command)
    steps = (run.checked or {}).get("steps")
    if not notes and (run.checked is None or steps == 0):
        what = "Nothing was checked" if run.is_over else "Not known yet (--check tells at the end)"
        return CheckVerdict("unchecked", f"{what}: `{command}` says whether N ranks train as one.", command)
    over = f" over {plural(steps, 'step')}" if isinstance(steps, int) else ""
    besides = f" but {plural(notes, 'declared difference')}" if notes else ""
    return CheckVerdict(
        "agrees",
        f"The ranks agree: --check compared them with each other{over} and found nothing{besides}. "
        f"Whether they train as one process would, `{command}` says.",
        command,
    )


def verify_command(about: Event) -> str:
    """Returns what a person types to have it proved.

    >>> verify_command({"command": ["train.py", "--name", "a b"], "ranks": 4})
    "samestep verify -n 4 train.py --name 'a b'"
    """
    command, ranks = about.get("command"), about.get("ranks")
    words = [escape_control(word) for word in command] if isinstance(command, list) and command else ["train.py"]
    count = ranks if isinstance(ranks, int) and 2 <= ranks <= MOST_RANKS else 2
    module = ["-m"] if about.get("module") is True else []
    return shlex.join(["samestep", "verify", "-n", str(count), *module, *words])


HANG = 124  # an exit code
_MOST_LAST_SEEN = 64  # ranks of which it is told what they were at

Word = Literal["running", "ended", "failed"]


@dataclass(frozen=True)
class State:
    word: Word
    sentences: tuple[str, ...]


def state(analysis: RunAnalysis, now: float) -> State:
    """Returns what became of the run; `now` is in seconds since 1970."""
    about = analysis.run.about
    word = _word(analysis)
    sentences = [_first(analysis)]
    if word == "running" and (quiet := _silence(analysis.logs, now)):
        age = format_duration(quiet)
        sentences.append(f"It is still running, or was killed with its launcher: the last line is {age} old.")
    elif word == "running":
        sentences.append("It is still running: this is what it has written by now.")
    elif about:
        sentences.append(_exit(about))
    if isinstance(failure := about.get("failure"), dict):
        sentences.append(f"Rank {_text(failure.get('rank'))} is to blame: {_cause(failure, 'signal')}.")
    sentences += [*_hangs(analysis), *_ranks(analysis, over=word != "running"), *_others(analysis), *_foreign(analysis)]
    return State(word, tuple(sentences))


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


def _exit(about: Event) -> str:
    code = about.get("exit")
    meaning = {
        0: "",
        PREEMPTED: ": preempted, and saved",
        HANG: ": it hung, and was stopped",
        128 + signal.SIGINT: ": Ctrl-C",
        128 + signal.SIGTERM: ": it was told to end, and had saved nothing by then",
    }
    return f"It ended with exit code {escape_control(code)}{meaning.get(code, '') if isinstance(code, int) else ''}."


def _hangs(analysis: RunAnalysis) -> Iterator[str]:
    """What the launcher has said of hangs: of those that ended the run the failure tells."""
    own = [one for one in analysis.run.launcher_events if one["attempt"] == analysis.number]
    said = [one for one in own if one["kind"] in {"hang", "moves"}]
    for one, after in zip_longest(said, said[1:]):
        if one["kind"] == "hang" and analysis.run.about.get("exit") != HANG:
            first = escape_control(str(one["text"]).partition("\n")[0])
            moved = f"; {escape_control(after['text'])}" if after is not None and after["kind"] == "moves" else ""
            yield f"It hung: {first}{moved}."


def _ranks(analysis: RunAnalysis, *, over: bool) -> Iterator[str]:
    silent = [log.rank for log in analysis.logs if log.end is None] if over else []
    if silent:
        yield f"{rank_list(silent).capitalize()} did not come to an end: killed, or stopped with the others."
    yield from (_last_seen(log) for log in analysis.logs[:_MOST_LAST_SEEN] if log.end is None and log.at)
    missing = sorted(set(range(min(analysis.size, 1 << 16))) - {log.rank for log in analysis.logs})
    if analysis.logs and missing:
        yield f"{rank_list(missing).capitalize()} {'has' if len(missing) == 1 else 'have'} left no event."
    if not analysis.logs:
        yield "No rank has written an event: the script ended before its first step, or did not begin."
    few: dict[int, list[int]] = {}
    for rank, count in analysis.table.left_out.items():
        few.setdefault(count, []).append(rank)
    for count, ranks in few.items() if analysis.steps else ():
        who, (have, be) = rank_list(ranks).capitalize(), ("has", "is") if len(ranks) == 1 else ("have each", "are")
        yield f"{who} {have} taken {plural(count, 'step')} and {be} not compared with the others."


def _last_seen(log: RankLog) -> str:
    """What a rank was at when it was last heard of, and had been for seconds."""
    phase, operation, site = (escape_control(log.at[key] or "") for key in ("phase", "operation", "site"))
    call = f" ({operation} at {site})" if operation else ""
    return f"Rank {log.rank} was last seen in its phase {phase!r}{call}, for over two seconds."


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
        "values (world.log)": any(log.values for log in analysis.logs),
        "shares of the work (samestep.shards)": analysis.ledger,
        "buckets of gradients": analysis.overlap,
    }
    absent = [name for name, found in lacking.items() if not found]
    if absent and analysis.size > 1:
        yield f"Not recorded, since the script does not report them: {join_and(absent)}."
