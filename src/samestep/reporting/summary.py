"""A run in words and in numbers: what became of it, is it the same training, where the time goes, what to change."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from samestep.events import NON_TRAINING
from samestep.reporting.advice import Advice, advice
from samestep.reporting.analysis import RunAnalysis
from samestep.reporting.run_log import Event, number_of
from samestep.reporting.status import CheckVerdict, State, check_verdict, state
from samestep.text import escape_control, format_bytes, format_duration, format_percent, plural

VERSION = 1  # of what --json writes
NAMES = {"evaluate": "evaluation", "save": "saving", "load": "loading"}
NO_STEP = "No step was finished."
NOTHING = "Nothing stands out."
MUCH = 0.2  # of all training, for one step


@dataclass(frozen=True)
class Summary:
    header: str  # what was run, when, and on what
    state: State  # what became of the run
    same: CheckVerdict  # whether it was the same training
    time: tuple[str, ...]  # where its time went, in sentences
    advice: tuple[Advice, ...]  # what to change, the greatest gain first

    @property
    def changes(self) -> list[str]:
        """What to change, in sentences; none where there was no step."""
        return [each.sentence for each in self.advice] or ([] if self.time == (NO_STEP,) else [NOTHING])


def summary(analysis: RunAnalysis, now: float) -> Summary:
    """Returns it; `now` is in seconds since 1970."""
    spent = tuple(_time(analysis)) if analysis.steps else (NO_STEP,)
    found = advice(analysis) if len(analysis.table) else []
    return Summary(header(analysis), state(analysis, now), check_verdict(analysis.run), spent, tuple(found))


def as_json(analysis: RunAnalysis, found: Summary) -> dict[str, Any]:
    """Returns what --json writes; docs/reporting.md explains the keys."""
    account = analysis.account
    return {
        "version": VERSION,
        "run_dir": str(analysis.run.path),
        "attempt": analysis.number,
        "attempts": analysis.run.attempts,
        "state": found.state.word,
        "exit": analysis.run.about.get("exit"),
        "ranks": analysis.size,
        "steps": analysis.steps,
        "last_step": analysis.last_step,
        "same": {"verdict": found.same.verdict, "command": found.same.command},
        "time": {
            "wall": account.wall,
            "training": account.training,
            "first_step": account.first,
            **{name: account.outside_training.get(name, 0.0) for name in NON_TRAINING},
            "rest": account.rest,
        },
        "step": {
            "mean": account.step,
            "median": account.median,
            "slowest": {"step": account.slowest_step, "seconds": account.slowest},
            "phases": account.phases,
        },
        "communication": _communication(analysis),
        "per_rank": [_rank(analysis, row) for row in range(len(analysis.table.ranks))],
        "imbalance": None if analysis.ledger is None else analysis.ledger.imbalance,
        "values": values(analysis),
        "advice": [vars(each) for each in found.advice],
        "findings": analysis.run.findings,
        "launcher": analysis.run.launcher_events,
        "checkpoints": checkpoints(analysis),
        "problems": analysis.run.problems,
        "sentences": {
            "state": list(found.state.sentences),
            "same": [found.same.sentence],
            "time": list(found.time),
            "advice": found.changes,
        },
    }


def checkpoints(analysis: RunAnalysis) -> list[dict[str, Any]]:
    """Returns the saves, one of all ranks' for each step and path."""
    keys = ("step", "t", "seconds", "path", "bytes", "reason")
    found = {(one["step"], one["path"]): one for log in analysis.logs for one in log.checkpoints}
    return [{key: one[key] for key in keys} for _, one in sorted(found.items())]


def values(analysis: RunAnalysis) -> dict[str, dict[str, Any]]:
    """Returns what became of each logged value, as the first rank that logs it says."""
    found: dict[str, list[Event]] = {}
    for log in analysis.logs:
        own = {name for line in log.values for name in line["values"]} - set(found)
        for line in log.values:
            for name in own & set(line["values"]):
                found.setdefault(name, []).append({"step": line["step"], "value": number_of(line["values"][name])})
    return {name: _course(points) for name, points in found.items()}


def _course(points: list[Event]) -> dict[str, Any]:
    finite = [point["value"] for point in points if math.isfinite(point["value"])]
    odd = [point["step"] for point in points if not math.isfinite(point["value"])]
    return {
        "first": finite[0] if finite else None,
        "last": finite[-1] if finite else None,
        "lowest": min(finite, default=None),
        "highest": max(finite, default=None),
        "logged": len(points),
        "not_finite": len(odd),
        "first_not_finite": odd[0] if odd else None,
    }


def _communication(analysis: RunAnalysis) -> dict[str, Any]:
    account, overlap = analysis.account, analysis.overlap
    return {
        "seconds": account.waits,
        "share": account.part(account.waits),
        "transfer": account.transfer,
        "delay": account.delay,
        "buckets": None if overlap is None else overlap.buckets,
        "bytes": None if overlap is None else overlap.size,
        "hidden": None if overlap is None else overlap.part,
        "calls": [vars(call) for call in analysis.calls],
    }


def _rank(analysis: RunAnalysis, row: int) -> dict[str, Any]:
    steady, rank = analysis.table.steady, analysis.table.ranks[row]
    log = next(log for log in analysis.logs if log.rank == rank)
    work = next((share for share in analysis.ledger.shares if share.rank == rank), None) if analysis.ledger else None
    own_work = None if analysis.ledger is None or analysis.ledger.unit == "elements" else work
    return {
        "rank": rank,
        "host": log.begin.get("host", log.host),
        "steps": sum(line["steps"] for line in log.steps),
        "own": float(analysis.pace.own[row]),
        "data": float(steady.by_rank(steady.of_phases("data"))[row]),
        "waits": float(steady.by_rank(steady.waits)[row]),
        "relative": float(analysis.pace.relative[row]),
        "samples": None if own_work is None else own_work.samples,
        "weight": None if own_work is None else own_work.weight,
        "elements": work.weight if work is not None and own_work is None else None,
        "epoch": None if own_work is None else own_work.epoch,
        "ended": log.end is not None,
        "error": log.end["error"] if log.end else None,
    }


def _time(analysis: RunAnalysis) -> Iterator[str]:
    account = analysis.account
    yield _whole(analysis)
    yield _step(analysis)
    if analysis.size > 1 and account.waits:
        yield _waits(analysis)
    beyond = account.first - account.median
    if len(analysis.table) > 1 and beyond > 0:
        yield (
            f"The first step took {format_duration(account.first)}, {format_duration(beyond)} more than a usual one "
            f"({format_percent(account.of_run(beyond))} of the run): building the model, warming up, compiling."
        )


def _whole(analysis: RunAnalysis) -> str:
    account = analysis.account

    def text(spent: float) -> str:
        return f"{format_duration(spent)} ({format_percent(account.of_run(spent))})"

    parts = [f"{text(account.training)} were training"]
    parts += [f"{NAMES[name]} {text(spent)}" for name, spent in account.outside_training.items()]
    if account.of_run(account.rest) > 0.005:
        parts.append(f"what lies before, between and behind {text(account.rest)}")
    return f"Of {format_duration(account.wall)} from begin to end {', '.join(parts)}."


def _step(analysis: RunAnalysis) -> str:
    account = analysis.account
    phases = sorted(account.phases.items(), key=lambda each: -each[1])
    shares = [(name, account.part(spent)) for name, spent in phases]
    text = ", ".join(f"{name} {format_percent(share)}" for name, share in shares if share >= 0.005)
    slowest = f"; the slowest, step {account.slowest_step:,}, {format_duration(account.slowest)}"
    alone = account.slowest / account.training if account.training else 0.0
    slowest += f", {format_percent(alone)} of all training" if alone > MUCH and analysis.steps > 1 / MUCH else ""
    return f"A step takes {format_duration(account.step)} (median {format_duration(account.median)}{slowest}): {text}."


def _waits(analysis: RunAnalysis) -> str:
    account, overlap = analysis.account, analysis.overlap
    text = (
        f"Communication keeps the ranks for {format_percent(account.part(account.waits))} of a step: "
        f"{format_percent(account.part(account.transfer))} the exchange itself, "
        f"{format_percent(account.part(account.delay))} waiting for slower ranks"
    )
    if overlap is None:
        return f"{text}."
    buckets = f"{plural(overlap.buckets, 'bucket')} of gradients ({format_bytes(overlap.size)})"
    if overlap.part is None:
        return f"{text}. {buckets}: when they were full is known, when they were back is not."
    part = f"{format_percent(overlap.part)} of the time that they travel passes beside other work"
    return f"{text}. {buckets}: {part}."


def header(analysis: RunAnalysis) -> str:
    """Returns what was run, when, and on what, in a line."""
    about = analysis.run.about
    command = about.get("command")
    words = [str(word) for word in command] if isinstance(command, list) else []
    begins = [log.begin["t"] for log in analysis.logs if log.begin]
    began = about["began"] if isinstance(about.get("began"), int | float) else min(begins, default=None)
    machines = [log.begin | log.machine for log in analysis.logs if log.machine]
    on = [list(dict.fromkeys(str(one[key]) for one in machines if one.get(key))) for key in ("torch", "device")]
    parts = [shlex.join(words), "" if began is None else clock(began)]
    parts += [f"{name}{' and '.join(found)}" for name, found in zip(("torch ", ""), on, strict=True) if found]
    return escape_control(", ".join(filter(None, parts)))


def clock(moment: float) -> str:
    """Returns a time since 1970 as the clock on the wall had it."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))
    except (OverflowError, ValueError, OSError):  # no time that a clock can show
        return "-"


def lines(found: Summary) -> list[str]:
    parts = {
        "": [*filter(None, [found.header]), *found.state.sentences],
        "is it the same training?": (found.same.sentence,),
        "where does the time go?": found.time,
        "what to change": found.changes,
    }
    shown: list[str] = []
    for heading, sentences in parts.items():
        shown += [heading] if heading and sentences else []
        shown += [escape_control(f"  {sentence}" if heading else sentence) for sentence in sentences]
    return shown
