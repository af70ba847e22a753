"""A run as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing show: a process a rank, a thread a kind.

    pid K  rank K     tid 1      phases         forward, backward, optimizer … of every step that was written in pieces
                      tid 2      collectives    the script's own, and the wait for gradients
                      tid 3      steps          whole steps; evaluations, saves
                      tid 4      pipeline       actions of a pipeline
                      tid 5      checkpoints    writes, which go on beside the training
                      tid 10 …   buckets        one thread for each that is under way at once
    counters          values    what the script logged
    pid 2^31 - 1      launcher   hangs, stragglers and restarts, as instants

Times are microseconds from the first rank's begin, on rank 0's clock. The format is Google's "Trace Event Format"
(docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU): events of a thread must nest, so buckets that
overlap have threads of their own. torch.profiler writes the same format, for every operator of a few steps.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from samestep.reporting.run_log import Event, RankLog, Run, instant, json_safe, measured
from samestep.reporting.steps import WAITS, valid_steps
from samestep.reporting.timeline import began

PHASES, COLLECTIVES, STEPS, PIPELINE, CHECKPOINTS, BUCKETS = 1, 2, 3, 4, 5, 10
THREADS = {PHASES: "phases", COLLECTIVES: "collectives", STEPS: "steps"}
OTHERS = {PIPELINE: "pipeline", CHECKPOINTS: "checkpoints"}
LAUNCHER = (1 << 31) - 1  # a process number that no rank has

_FIELDS = dict[str, Any]
_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
_BLOCK = 1000  # events
_ROUNDED = 3.0  # microseconds that times in a file may be off


def trace(run: Run, logs: Sequence[RankLog]) -> Iterator[str]:
    """Yields the text of the trace of an attempt, piece by piece: it may be larger than memory."""
    yield '{"displayTimeUnit":"ms","traceEvents":['
    events = map(_text, _events(run, logs, _zero(logs)))
    head = ""
    while block := list(islice(events, _BLOCK)):
        yield head + ",\n".join(block)
        head = ",\n"
    yield "]}\n"


def _text(event: _FIELDS) -> str:
    try:
        return _ENCODER.encode(event)
    except ValueError:  # a number that is none
        return _ENCODER.encode(json_safe(event))


def _zero(logs: Sequence[RankLog]) -> float:
    begins = [log.begin["t"] - log.clock_offset for log in logs if log.begin]
    begins += [log.steps[0]["t"] - log.clock_offset for log in logs if log.steps]
    return min(begins, default=0.0)


def _events(run: Run, logs: Sequence[RankLog], zero: float) -> Iterator[_FIELDS]:
    for log in logs:
        yield _name(log.rank, f"rank {log.rank} on {log.host}")
        for thread, name in {**THREADS, **(OTHERS if log.pipelines or log.checkpoints else {})}.items():
            yield _name(log.rank, name, thread)
        yield from _Rank(log, zero).events()
    said = [one for one in run.launcher_events if not logs or one["attempt"] == logs[0].attempt]
    if said:
        yield _name(LAUNCHER, "launcher")
    for one in said:
        fields = {"name": one["kind"], "ph": "i", "s": "g", "ts": _micros(instant(one["t"]) - zero)}
        yield fields | {"pid": LAUNCHER, "tid": 1, "args": {"text": one["text"], "ranks": one["ranks"]}}


class _Rank:
    def __init__(self, log: RankLog, zero: float) -> None:
        self._log, self._zero = log, zero
        self._lanes: list[float] = []  # until when each thread of buckets is taken
        self._until: dict[int, float] = {}  # when the last box of each thread ended

    def events(self) -> Iterator[_FIELDS]:
        for line in valid_steps(self._log.steps).values():
            yield from self._step(line)
        for line in self._log.pipelines:
            yield from self._pipeline(line)
        for line in self._log.checkpoints:
            args, length = {key: line[key] for key in ("path", "bytes", "reason")}, 1e6 * measured(line["seconds"])
            yield self._box(CHECKPOINTS, f"checkpoint {line['step']}", self._at(line["t"]), length, args)
        for line in self._log.values:
            at = {"ph": "C", "ts": self._at(line["t"]), "pid": self._log.rank}
            for name, value in line["values"].items():
                if not isinstance(value, str):
                    yield {"name": name, **at, "args": {name: value}}

    def _at(self, moment: float) -> float:
        return _micros(moment - self._log.clock_offset - self._zero)

    def _box(self, thread: int, name: str, begin: float, length: float, args: _FIELDS | None = None) -> _FIELDS:
        """A box that does not begin before the one before it ends, where only rounding says that it does."""
        until = self._until.get(thread, begin)
        since = until if 0 < until - begin < _ROUNDED else begin
        self._until[thread] = end = max(since, begin + measured(length))
        times = {"ts": round(since, 1), "dur": round(end - since, 1)}
        return {"name": name, "ph": "X", **times, "pid": self._log.rank, "tid": thread, "args": args or {}}

    def _step(self, line: Event) -> Iterator[_FIELDS]:
        args = {"spent": line["spent"], "work": line["work"]}
        name = f"step {line['step']}" if line["steps"] == 1 else f"{line['steps']} steps to {line['step']}"
        yield self._box(STEPS, name, self._at(line["t"]), 1e6 * measured(line["seconds"]), args)
        begin = self._at(began(line))
        for phase, since, length, *call in line["spans"]:
            yield self._box(PHASES, str(phase), begin + measured(since), length)
            if phase in WAITS:
                operation, where = (*map(str, call[:2]), "", "")[:2] if call else ("gradients", "")
                yield self._box(COLLECTIVES, operation, begin + measured(since), length, {"where": where})
        for bucket in line["buckets"]:
            yield from self._bucket(bucket, begin)

    def _bucket(self, bucket: Sequence[Any], begin: float) -> Iterator[_FIELDS]:
        number, size, ready, begun, done = bucket
        if begun is not None and done is not None:
            since, until = begin + measured(begun), begin + measured(done)
            yield from self._travel(f"bucket {number}", since, until, {"bytes": size, "full": ready})
        elif ready is not None:
            full = {"name": f"bucket {number} full", "ph": "i", "s": "t", "ts": round(begin + measured(ready), 1)}
            yield full | {"pid": self._log.rank, "tid": BUCKETS, "args": {"bytes": size}}

    def _travel(self, name: str, since: float, until: float, args: _FIELDS) -> Iterator[_FIELDS]:
        lane = next((lane for lane, taken in enumerate(self._lanes) if taken <= since), len(self._lanes))
        if lane == len(self._lanes):
            self._lanes.append(0.0)
            yield _name(self._log.rank, "buckets" if not lane else f"buckets {lane + 1}", BUCKETS + lane)
        self._lanes[lane] = until
        yield self._box(BUCKETS + lane, name, since, until - since, args)

    def _pipeline(self, line: Event) -> Iterator[_FIELDS]:
        begin = self._at(line["t"])
        for kind, stage, micro, since, until in line["actions"]:
            at = begin + 1e6 * measured(since)
            length = 1e6 * (measured(until) - measured(since))
            yield self._box(PIPELINE, f"{kind}{micro}", at, length, {"stage": stage})


def _name(process: int, name: str, thread: int | None = None) -> _FIELDS:
    of = {"name": "process_name"} if thread is None else {"name": "thread_name", "tid": thread}
    return {**of, "ph": "M", "pid": process, "args": {"name": name}}


def _micros(seconds: float) -> float:
    return round(1e6 * max(-1e9, min(1e9, seconds)), 1)
