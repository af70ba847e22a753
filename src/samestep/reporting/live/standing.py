"""What each rank is at, how the run stands, and what has happened to it."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from samestep import progress
from samestep.events import LOST_PEERS
from samestep.launch.verdict import PREEMPTED
from samestep.paths import rank_file
from samestep.reporting.live.pace import Pace, measured, pace
from samestep.reporting.record import Event, RankLog, Run
from samestep.text import escape_control, escape_lines, format_bytes, format_elapsed

__all__: list[str] = []

Level = Literal["", "dim", "good", "warn", "bad"]
QUIET = 2.0  # seconds without a step that need no word
MANY = 5  # lines of steps that would have fitted in, likewise
SILENT = 60.0  # seconds without any event after which a run may have been killed with its launcher
DOING = {"train": "computing", "data": "waiting for data", "wait": "waiting for others", "optimizer": "stepping"}
DOING |= {"evaluate": "evaluating", "save": "saving", "load": "loading"}
_MOST_RANKS = 1 << 14  # rows of ranks that have written nothing; a changed file may tell of any number


@dataclass(frozen=True)
class Standing:
    """A few words, and how grave they are."""

    text: str
    level: Level = ""

    @property
    def is_remarkable(self) -> bool:
        """Whether somebody who looks for trouble should see it."""
        return self.level in {"warn", "bad"}


ENDED = {0: Standing("finished", "good"), PREEMPTED: Standing("preempted, and saved", "warn")}  # by exit code


@dataclass(frozen=True)
class Happening:
    """Something that happened to the run: when, of what kind, and in how many lines it may be told."""

    kind: str
    text: str
    level: Level = ""
    at: float | None = None
    ranks: tuple[int, ...] = ()

    @property
    def clock(self) -> str:
        """When it was, by the clock on the wall; blank where nobody knows."""
        try:
            return " " * 8 if self.at is None else time.strftime("%H:%M:%S", time.localtime(self.at))
        except (OverflowError, ValueError, OSError):
            return " " * 8


@dataclass(frozen=True)
class Said:
    """What the launcher's events come to by now."""

    slow: frozenset[int] = frozenset()
    missing: frozenset[int] = field(default=frozenset())  # whom the others wait for in vain
    hangs: bool = False


def said(run: Run, attempt: int) -> Said:
    """Returns what the launcher has said of an attempt, as far as it still holds."""
    slow: set[int] = set()
    missing: frozenset[int] = frozenset()
    hangs = False
    for event in run.said:
        if event["attempt"] != attempt:
            continue
        if event["kind"] == "straggler":
            slow.update(event["ranks"])
        elif event["kind"] == "keeps-up":
            slow.difference_update(event["ranks"])
        elif event["kind"] in {"hang", "moves"}:
            hangs = event["kind"] == "hang"
            missing = frozenset(event["ranks"] if hangs else ())
    return Said(frozenset(slow), missing, hangs)


def ranks_of(run: Run, attempt: int) -> list[int]:
    """Returns all ranks that an attempt has, those that have not said anything too."""
    known = {rank for number, rank in run.ranks if number == attempt}
    sizes = [log.begin.get("size") for log in run.attempt(attempt)] + [run.about.get("ranks")]
    size = max((each for each in sizes if isinstance(each, int)), default=0)
    return sorted(known | set(range(min(size, _MOST_RANKS))))


# --- a rank -----------------------------------------------------------------------------------------


def standing(log: RankLog | None, pace: Pace, told: Said, now: float, *, is_over: bool) -> Standing:
    """Returns what a rank is at; `is_over` says that its attempt is."""
    if log is None:
        return Standing("has not begun" if not is_over else "did not begin", "dim")
    if log.end is not None:
        return _ended(log.end["error"])
    if is_over:
        return Standing("was ended", "warn")
    at = _at(log, pace, now)
    if log.rank in told.missing:
        return Standing(f"missing for {roughly(now - last_sign(log))}", "bad")
    if log.rank in told.slow:
        return Standing(f"slow{at and ': '}{at}", "warn")
    return Standing(at, "warn" if told.hangs else "")


def _ended(error: str | None) -> Standing:
    if error is None:
        return Standing("finished", "good")
    return Standing(LOST_PEERS, "warn") if error.startswith(LOST_PEERS) else Standing(escape_control(error), "bad")


def _at(log: RankLog, pace: Pace, now: float) -> str:
    at = _noted(log) or _told(log, now)
    if at:
        return at
    since = last_sign(log)
    quiet = max(0.0, now - since) if since else 0.0
    if not log.steps:
        return f"no step yet, {roughly(quiet)}" if quiet > QUIET else "no step yet"
    if quiet > max(QUIET, _many_lines(log, pace)):
        return f"no step for {roughly(quiet)}"
    apart = [name for name in ("evaluate", "save", "load") if pace.spent.get(name)]
    return {"evaluate": "evaluated", "save": "saved", "load": "loaded"}[apart[0]] if apart else ""


def _many_lines(log: RankLog, pace: Pace) -> float:
    """Seconds in which a rank that goes on writes MANY lines; beyond the 10,000th step a line stands for several."""
    return MANY * pace.seconds * max(1.0, measured(log.steps[-1]["steps"])) if log.steps else 0.0


def _told(log: RankLog, now: float) -> str:
    """What the rank itself has told of a piece of a step that has lasted for long, and goes on."""
    if not log.at:
        return ""
    name = log.at["operation"] or DOING.get(log.at["phase"], log.at["phase"])
    where = f" at {log.at['site']}" if log.at["site"] else ""
    return escape_control(f"{name} for {roughly(now - log.at['t'] + log.ahead)}{where}")


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
    last = log.steps[-1] if log.steps else log.begin
    return measured(last.get("t")) + measured(last.get("seconds")) - log.ahead if last else 0.0


def roughly(seconds: float) -> str:
    """Returns a time in its largest unit: there is little room.

    >>> roughly(59.9), roughly(179), roughly(7300)
    ('59 s', '2 min', '2 h')
    """
    return " ".join(format_elapsed(max(0.0, seconds)).split()[:2])


# --- the run ------------------------------------------------------------------------------------------


def state(run: Run, told: Said, now: float) -> Standing:
    """Returns how the run stands as a whole."""
    if run.is_over:
        code = run.about.get("exit")
        if not run.about:
            failed = any(log.end is not None and log.end["error"] is not None for log in run.ranks.values())
            return Standing("failed", "bad") if failed else Standing("finished", "good")
        known = ENDED.get(code) if isinstance(code, int) else None
        return known or Standing(f"failed, exit code {escape_control(code)}", "bad")
    if told.hangs:
        return Standing("hangs", "bad")
    quiet = now - max(filter(None, map(last_sign, run.ranks.values())), default=now)
    if quiet > max([SILENT, *(_many_lines(log, pace(log)) for log in run.ranks.values())]):
        return Standing(f"running? silent for {roughly(quiet)}", "warn")
    return Standing("running", "good")


def took(run: Run, now: float) -> float:
    """Returns how long the run has been going, or went."""
    begins = [measured(log.begin.get("t")) for log in run.ranks.values() if log.begin]
    began = measured(run.about.get("began")) or min(begins, default=now)
    ended = measured(run.about.get("ended"))
    if run.is_over and not ended:
        ended = max(map(last_sign, run.ranks.values()), default=now)
    return max(0.0, (ended or now) - began)


def blamed(run: Run) -> int | None:
    """Returns the rank that the launcher blames for the end of the run."""
    found = run.about.get("failure")
    rank = found.get("rank") if isinstance(found, dict) else None
    return rank if isinstance(rank, int) else None


def failure(run: Run) -> str:
    """Returns why the run failed, in a line; "" where it did not."""
    found = run.about.get("failure")
    if not isinstance(found, dict):
        return ""
    what = ": ".join(_text(found[key]) for key in ("exception", "message") if found.get(key))
    if not what and found.get("signal"):
        what = f"ended by signal {_text(found['signal'])}"
    where = f", at {_text(found['where'])}" if found.get("where") else ""
    return f"rank {_text(found.get('rank'))} on {_text(found.get('host'))}: {what or 'failed'}{where}"


def happenings(run: Run) -> list[Happening]:
    """Returns what has happened, in its order; what has no time comes last."""
    timed = [*_from_launcher(run), *_saved(run)]
    timed.sort(key=lambda each: each.at or 0.0)
    problems = [Happening("note", escape_control(problem), "warn") for problem in run.problems]
    return [*timed, *map(_finding, run.findings), *problems]


def _from_launcher(run: Run) -> Iterator[Happening]:
    levels: dict[str, Level] = {"hang": "bad", "restart": "bad", "straggler": "warn", "network": "warn"}
    levels |= {"moves": "good", "keeps-up": "good"}
    for event in run.said:
        if event["kind"] in levels:
            kind, text = event["kind"], escape_lines(event["text"])
            yield Happening(kind, text, levels[kind], measured(event["t"]), tuple(event["ranks"]))


def _saved(run: Run) -> Iterator[Happening]:
    """Yields the last checkpoint: all of them would leave no room."""
    saves = [event for log in run.ranks.values() for event in log.checkpoints]
    if saves:
        last = max(saves, key=lambda event: measured(event["t"]))
        reason = f", {escape_control(last['reason'])}" if last["reason"] else ""
        size = format_bytes(measured(last["bytes"]))
        text = f"step {last['step']:,}, {size}{reason}: {escape_control(last['path'])}"
        yield Happening("saved", text, "dim", measured(last["t"]))


def _finding(found: Event) -> Happening:
    level: Level = "bad" if found.get("severity") == "error" else "dim"
    place = "".join(f", {key} {_text(found[key])}" for key in ("rank", "step") if found.get(key) is not None)
    where = f" at {_text(found['where'])}" if found.get("where") else ""
    text = f"{_text(found.get('code'))}{place}{where}: {_text(found.get('cause'))}"
    fix = f"\n{escape_lines(found['fix'])}" if found.get("fix") else ""
    rank = found.get("rank")
    return Happening("finding", text + fix, level, ranks=(rank,) if isinstance(rank, int) else ())


def _text(value: Any) -> str:
    return "?" if value is None else escape_control(value)
