"""Run directories whose every number is known: written line by line, as ranks and their launcher write them.

data │ forward │ backward │ wait ············│ optimizer      all ranks leave the wait together, `transfer` after
                 [ready, begun, done] buckets                 the last has come: so who is slow makes others wait
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

T0 = 1_790_000_000.0
OWN = {"data": 1_000, "forward": 4_000, "backward": 8_000, "optimizer": 2_000}  # microseconds

Fields = dict[str, Any]


@dataclass
class Made:
    """A run to be.

    Attributes:
        own: microseconds that a rank spends in its own phases in a step (from 1), by phase.
        transfer: microseconds from the last rank's arrival to the end of the wait.
        buckets: how many gradient buckets are filled, evenly over the backward; each travels until the next is full.
        work, values: fields of a rank's step, {} for none.
        apart: seconds of a step beyond its own phases, such as {"save": 0.5}; a piece before all others.
        ahead: seconds that a rank's clock is ahead.
        ended: ranks that have written their end.
        about: what run.json says beyond the usual; None for no such file.
        stride: steps that a line stands for.
    """

    path: Path
    ranks: int = 2
    steps: int = 20
    attempt: int = 0
    transfer: int = 3_000
    buckets: int = 0
    stride: int = 1
    own: Callable[[int, int], dict[str, int]] = lambda rank, step: OWN
    work: Callable[[int, int], Fields] = lambda rank, step: {}
    values: Callable[[int, int], Fields] = lambda rank, step: {}
    apart: Callable[[int, int], dict[str, float]] = lambda rank, step: {}
    ahead: Callable[[int], float] = lambda rank: 0.0
    host: Callable[[int], str] = lambda rank: "node0"
    ended: Callable[[int], bool] = lambda rank: True
    begin: Fields = field(default_factory=dict)
    about: Fields | None = field(default_factory=dict)

    def write(self) -> Path:
        """Writes everything; returns the run directory."""
        begins = self._begins()
        for rank in range(self.ranks):
            file = self.file(rank)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("".join(json.dumps(line) + "\n" for line in self._lines(rank, begins)))
        if self.about is not None:
            (self.path / "run.json").write_text(json.dumps(self._record(begins[-1])))
        return self.path

    def file(self, rank: int) -> Path:
        return self.path / str(self.attempt) / self.host(rank) / f"rank{rank}.events.jsonl"

    def append(self, rank: int, kind: str, step: int = 0, t: float = T0, **fields: Any) -> None:
        """Adds a line to what a rank has written."""
        with self.file(rank).open("a") as file:
            file.write(json.dumps(self._head(rank, kind, step, t) | fields) + "\n")

    def say(self, kind: str, text: str, *ranks: int, t: float = T0) -> None:
        """Adds an event of the launcher's."""
        line = {**self._head(None, kind, 0, t), "text": text, "ranks": list(ranks)}
        with (self.path / "events.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def find(self, **finding: Any) -> None:
        """Adds a finding of --check, and says that it was run."""
        usual = {"code": "parameters-diverged", "severity": "error", "rank": None, "step": None, "tensor": None}
        usual |= {"factor": None, "where": None, "cause": "they differ", "fix": None}
        with (self.path / "findings.jsonl").open("a") as file:
            file.write(json.dumps(usual | finding) + "\n")

    def check(self, steps: int) -> None:
        """Says that --check saw so many steps."""
        (self.path / "checked.json").write_text(json.dumps({"ranks": self.ranks, "steps": steps}))

    def _head(self, rank: int | None, kind: str, step: int, t: float) -> Fields:
        return {"v": 1, "t": t, "rank": rank, "attempt": self.attempt, "kind": kind, "step": step}

    def _record(self, end: float) -> Fields:
        host = {"host": "node0", "hosts": {"node0": self.ranks}, "run_id": "feed", "directory": "/somewhere"}
        usual = {"samestep": "0.1.0", "command": ["train.py", "--lr", "0.1"], "module": False, "ranks": self.ranks}
        usual |= host | {"began": T0 - 2, "restarts": self.attempt, "ended": end, "exit": 0, "failure": None}
        return usual | self.about

    def _begins(self) -> list[float]:
        """When each step begins, on rank 0's clock, and when the last one ends."""
        begins = [T0]
        for step in range(1, self.steps + 1):
            longest = max(self._seconds(rank, step) for rank in range(self.ranks))
            begins.append(begins[-1] + longest)
        return begins

    def _arrival(self, rank: int, step: int) -> int:
        own = self.own(rank, step)
        before = sum(round(1e6 * seconds) for seconds in self.apart(rank, step).values())
        return before + sum(own.get(name, 0) for name in ("data", "forward", "backward"))

    def _departure(self, step: int) -> int:
        return self.transfer + max(self._arrival(rank, step) for rank in range(self.ranks))

    def _seconds(self, rank: int, step: int) -> float:
        return (self._departure(step) + self.own(rank, step).get("optimizer", 0)) / 1e6

    def _spans(self, rank: int, step: int) -> list[list[Any]]:
        own, at, spans = self.own(rank, step), 0, []
        pieces = {name: round(1e6 * seconds) for name, seconds in self.apart(rank, step).items()}
        pieces |= {name: own.get(name, 0) for name in ("data", "forward", "backward")}
        wait = self._departure(step) - self._arrival(rank, step) if self.ranks > 1 else 0
        for name, length in {**pieces, "wait": wait, "optimizer": own.get("optimizer", 0)}.items():
            if length:
                spans.append([name, at, length])
                at += length
        return spans

    def _full(self, spans: list[list[Any]]) -> list[list[Any]]:
        begin, length = next((span[1:3] for span in spans if span[0] == "backward"), (0, 0))
        each = length // max(1, self.buckets)
        full = [begin + each * (number + 1) for number in range(self.buckets)]
        return [[number, 1 << 20, at, at + 10, at + 10 + each] for number, at in enumerate(full)]

    def _lines(self, rank: int, begins: list[float]) -> Iterator[Fields]:
        shift = self.ahead(rank)
        host = {"host": self.host(rank), "pid": 1000 + rank, "size": self.ranks, "python": "3.11.7"}
        yield self._head(rank, "begin", 0, T0 + shift) | host | self.begin
        machine = {"torch": "2.13.0+cpu", "backend": "gloo", "device": "cpu", "threads": 1}
        yield self._head(rank, "machine", 1, T0 + shift) | machine
        spent: dict[str, float] = {}
        since = begins[0]
        for step, begin in enumerate(begins[:-1], 1):
            spans = self._spans(rank, step)
            for name, _, length in spans:
                spent[name] = spent.get(name, 0.0) + length / 1e6
            if values := self.values(rank, step):
                yield self._head(rank, "values", step, begin + shift) | {"values": values}
            if step % self.stride:
                continue
            fields = {"steps": self.stride, "seconds": round(sum(spent.values()), 6), "spent": spent, "spans": spans}
            fields |= {"more": 0, "buckets": self._full(spans), "work": self.work(rank, step)}
            yield self._head(rank, "step", step, round(since + shift, 6)) | fields
            spent, since = {}, begins[step]
        if self.ended(rank):
            yield self._head(rank, "end", self.steps, begins[-1] + shift) | {"error": None}
