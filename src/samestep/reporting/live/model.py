"""What there is to see of a run at one moment, before it is laid out."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, Literal

from samestep.paths import rank_file
from samestep.reporting import status
from samestep.reporting.run_log import Event, RankLog, RecentSteps, Run, measured, recent_steps
from samestep.reporting.status import RankStatus, RunEvent
from samestep.text import escape_control, format_duration, format_number, plural

Panel = Literal["out", "err", "events"]
PAGE = 10  # ranks that page up and down move by

KEYS = (
    ("up k · down j", "the rank before, the next"),
    ("PgUp · PgDn", f"{PAGE} ranks up, down"),
    ("Home g · End G", "the first rank, the last"),
    ("n", "the next problem rank: slow, missing, failed"),
    ("Tab · o · e", "the rank's standard output, or standard error"),
    ("f", "events in full: hangs, stragglers, findings"),
    ("a", "another attempt of the run"),
    ("Space", "stop reading, and go on"),
    ("? h", "these keys"),
    ("q Ctrl-C", "leave; the run goes on"),
)


@dataclass
class ViewState:
    rank: int | None = None  # whose output is shown; None leaves it to the run
    panel: Panel | None = None  # which of it, or what has happened instead; None likewise
    attempt: int | None = None  # of the run; None follows the latest
    is_paused: bool = False  # nothing is read meanwhile
    is_help: bool = False  # the keys are explained

    def handle_key(self, key: str, model: WatchModel) -> bool:
        """Obeys a key that is pressed at this sight of the run; returns whether to go on."""
        panels: dict[str, Panel] = {"o": "out", "e": "err", "tab": "err" if model.panel == "out" else "out"}
        panels["f"] = "out" if model.panel == "events" else "events"
        if self.is_help:
            self.is_help = False  # whatever the key
        elif key in panels:
            self.panel = panels[key]
        elif key == " ":
            self.is_paused = not self.is_paused
        elif key == "a":
            self._other_attempt(model.attempts)
        elif key in {"?", "h"}:
            self.is_help = True
        elif key == "q":
            return False
        elif key == "n":
            problems = [rank for rank in model.ranks if model.row(rank).at.level in {"warn", "bad"}]
            self.rank = next((rank for rank in problems if rank > model.rank), problems[0] if problems else self.rank)
        elif model.ranks:
            self._move(key, model.ranks, model.rank)
        return True

    def _other_attempt(self, attempts: Sequence[int]) -> None:
        """The one before, round to the latest, which is followed."""
        if attempts:
            now = attempts[-1] if self.attempt is None else self.attempt
            before = [each for each in attempts if each < now]
            self.attempt = before[-1] if before else None

    def _move(self, key: str, ranks: Sequence[int], now: int) -> None:
        last = len(ranks) - 1
        at = next((row for row, rank in enumerate(ranks) if rank >= now), last)
        moves = {"up": -1, "k": -1, "down": 1, "j": 1, "pageup": -PAGE, "pagedown": PAGE}
        ends = {"home": 0, "g": 0, "end": last, "G": last}
        if key in moves or key in ends:
            self.rank = ranks[min(last, max(0, ends.get(key, at + moves.get(key, 0))))]


# --- a run as it is seen -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    rank: int
    host: str
    step: int
    pace: RecentSteps
    at: RankStatus


@dataclass(frozen=True)
class Value:
    """What the script has logged under one name: the last, and those before."""

    name: str
    last: str
    before: list[Any]


@dataclass
class WatchModel:
    """A run, as somebody looks at it who has chosen what to see."""

    run: Run
    choice: ViewState
    now: float
    trouble: str = ""  # why the files could not be read the last time

    @cached_property
    def attempt(self) -> int:
        chosen = self.choice.attempt
        return chosen if chosen in self.attempts else max(self.attempts, default=0)

    @cached_property
    def attempts(self) -> list[int]:
        return self.run.attempts

    @cached_property
    def logs(self) -> dict[int, RankLog]:
        return {log.rank: log for log in self.run.attempt(self.attempt)}

    @cached_property
    def ranks(self) -> list[int]:
        return status.ranks_of(self.run, self.attempt)

    @cached_property
    def rank(self) -> int:
        """Whose output is shown: where nobody has chosen, of the rank to blame."""
        first = self.ranks[0] if self.ranks else 0
        blamed = [status.blamed(self.run), *sorted(self.launcher_state.missing)]
        found = next((rank for rank in blamed if rank in self.ranks), None)
        return self.choice.rank if self.choice.rank is not None else first if found is None else found

    @cached_property
    def panel(self) -> Panel:
        """Which of it: where nobody has chosen, what a rank says that has failed."""
        failed = status.blamed(self.run) == self.rank and self.is_over
        return self.choice.panel or ("err" if failed else "out")

    @cached_property
    def launcher_state(self) -> status.LauncherState:
        return status.launcher_state(self.run, self.attempt)

    @cached_property
    def is_over(self) -> bool:
        return self.run.is_over or self.attempt != max(self.attempts, default=self.attempt)

    @cached_property
    def paces(self) -> dict[int, RecentSteps]:
        """Where the time of the last steps went, by rank."""
        return {rank: recent_steps(log) for rank, log in self.logs.items()}

    def row(self, rank: int) -> Row:
        log, its = self.logs.get(rank), self.paces.get(rank, RecentSteps())
        at = status.rank_status(log, its, self.launcher_state, self.now, is_over=self.is_over)
        blamed = status.blamed(self.run)
        if at.level == "bad" and blamed not in {None, rank}:
            at = RankStatus(at.text, "warn")  # a victim
        is_last = self.is_over and self.attempt == max(self.attempts, default=self.attempt)
        if blamed == rank and is_last and (log is None or log.end is None):
            at = RankStatus("failed", "bad")  # and was gone before it could write so
        host = "" if log is None else escape_control(log.host)
        return Row(rank, host, 0 if log is None else log.step, its, at)

    @cached_property
    def failure(self) -> str:
        """Why it failed, or cannot be read any more, in a line."""
        return escape_control(self.trouble) if self.trouble else status.failure(self.run)

    @cached_property
    def run_events(self) -> list[RunEvent]:
        return status.run_events(self.run)

    @cached_property
    def seconds(self) -> float:
        """Of a step, the median of the ranks; 0 where nothing is known."""
        known = [each.seconds for each in self.paces.values() if each.seconds]
        return median(known) if known else 0.0

    def name(self, room: int) -> str:
        """Returns the run, its ranks, its command; of its path only the end where there is no room for all."""
        about = self.run.about
        command = about.get("command")
        words = " ".join(map(str, command)) if isinstance(command, list) else ""
        hosts = sorted({log.host for log in self.logs.values()})
        where = f" on {hosts[0] if len(hosts) == 1 else f'{len(hosts)} hosts'}" if hosts else ""
        attempt = f", attempt {self.attempt}" if self.attempts[1:] else ""
        ranks = f"{plural(len(self.ranks), 'rank')}{where}{attempt}"
        paths = path_as_said(self.run.path), _whole(self.run.path).name
        names = ["  ".join(map(escape_control, filter(None, (path, ranks, words)))) for path in paths]
        return names[len(names[0]) > room]

    @property
    def figures(self) -> list[str]:
        step = max((log.step for log in self.logs.values()), default=0)
        words = [f"step {escape_control(f'{step:,}')}"]
        if self.seconds:
            words.append(f"{format_duration(self.seconds)} a step")
            words.append(f"{format_number(float(f'{1 / self.seconds:.3g}'))} steps/s")
            samples = sum(  # of a pipeline all stages tell the same
                self.paces[rank].samples
                for rank, log in self.logs.items()
                if not log.pipelines or any(stage == 0 for _, stage, *_ in log.pipelines[-1]["actions"])
            )
            words += [f"{samples / self.seconds:,.0f} samples/s"] if samples else []
        epochs = [measured(log.steps[-1]["work"].get("epoch")) for log in self.logs.values() if log.steps]
        return words + ([f"epoch {format_number(max(epochs))}"] if any(epochs) else [])

    @cached_property
    def values(self) -> list[Value]:
        """What the script has logged: of the first rank that logs anything."""
        events: Sequence[Event] = next((log.values for log in self.logs.values() if log.values), ())
        by_name: dict[str, list[Any]] = {}
        for event in events:
            for name, value in event["values"].items():
                by_name.setdefault(name, []).append(value)
        return [Value(escape_control(name), _number(all_[-1]), all_) for name, all_ in by_name.items()]

    def output(self) -> Path:
        stream = "err" if self.panel == "err" else "out"
        log = self.logs.get(self.rank)
        if log is None:
            kept = rank_file(self.run.path / str(self.attempt), self.rank, stream)
            return next(kept.parent.glob(f"*/{kept.name}"), kept)
        own = log.output(stream)
        if log.folder.suffix == ".spawned" and not own.exists():
            return log.folder.parent / f"{log.folder.stem}.{stream}"  # it prints where its starter does
        return own


def path_as_said(path: Path) -> str:
    whole, here = _whole(path), _whole(Path())
    return str(whole.relative_to(here)) if whole.is_relative_to(here) else str(whole)


def _whole(path: Path) -> Path:
    try:
        return Path(os.path.abspath(path))  # noqa: PTH100  (resolve() would follow links, and name another directory)
    except FileNotFoundError:  # the directory that this process stands in is gone
        return path


def _number(value: Any) -> str:
    try:
        return escape_control(value) if isinstance(value, str) else format_number(value)
    except OverflowError:
        return "inf"
