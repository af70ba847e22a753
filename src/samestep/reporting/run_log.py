"""A run as its directory tells of it, while it goes on or afterwards: ranks, steps, findings, output.

    run.json                        command, ranks, times, exit code     absent where samestep run did not start it
    events.jsonl                    what the launcher said
    findings.jsonl, checked.json    what --check found, and over how many steps
    <attempt>/<host>/rankK.events.jsonl      a rank's steps
    <attempt>/<host>/rankK.spawned/rankJ.…   of ranks that a script has started by itself

Everything in it is somebody else's text: whoever shows it escapes it.
"""

from __future__ import annotations

import json
import marshal
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import median
from sys import intern
from typing import Any

from samestep.errors import UsageError
from samestep.events import NON_TRAINING, PHASES, Reader
from samestep.paths import RunDirectory, rank_file
from samestep.text import escape_control, escape_lines

Event = dict[str, Any]
_MOST = 1e12  # seconds, steps or bytes; more is no measurement
_LARGEST = 64 << 20  # bytes of a file that is read whole
_LAST = 1e11  # seconds since 1970; later is no time


@dataclass
class RankLog:
    rank: int
    attempt: int  # of the run
    host: str  # the name of its host's folder
    folder: Path  # where its files lie
    begin: Event = field(default_factory=dict)  # its "begin", or {}
    machine: Event = field(default_factory=dict)  # its "machine", or {}
    steps: list[Event] = field(default_factory=list)  # its "step" events, in order; the last may be of 0 steps
    values: list[Event] = field(default_factory=list)  # its "values"
    checkpoints: list[Event] = field(default_factory=list)  # its "checkpoint" events
    pipelines: list[Event] = field(default_factory=list)  # its "pipeline" events
    at: Event = field(default_factory=dict)  # its last "at", {} where a step has ended since
    end: Event | None = None  # its "end", None while it runs, or where it was killed
    dropped: int = 0  # lines that its writer had no room for
    clock_offset: float = 0.0  # seconds that its clock is ahead of rank 0's
    reader: Reader = field(repr=False, default_factory=lambda: Reader(Path()))

    def take(self) -> int:
        """Reads what has been written since the last time; returns how many events."""
        lists = {"step": self.steps, "values": self.values, "checkpoint": self.checkpoints, "pipeline": self.pipelines}
        count = 0
        for event in self.reader.events():
            count += 1
            kind = event["kind"]
            if kind in lists:
                lists[kind].append(event)
                self.at = {} if kind == "step" and self.at and self.at["step"] < event["step"] else self.at
            elif kind in ("begin", "machine", "at", "end"):
                setattr(self, kind, event)
            elif kind == "dropped":
                self.dropped += event["lines"]
        return count

    @property
    def step(self) -> int:
        return int(self.steps[-1]["step"]) if self.steps else 0

    def output(self, stream: str) -> Path:
        """Returns the file of its standard output ("out") or error ("err")."""
        return rank_file(self.folder, self.rank, stream)


@dataclass
class Run:
    """What a run directory says; `problems` could not be read."""

    path: Path
    about: Event = field(default_factory=dict)  # its run.json, {} where there is none
    ranks: dict[tuple[int, int], RankLog] = field(default_factory=dict)  # by attempt and rank
    launcher_events: list[Event] = field(default_factory=list)  # the launcher's events
    findings: list[Event] = field(default_factory=list)  # those of --check, as `samestep verify --json` has them
    checked: Event | None = None  # what --check says of itself; None where it was not asked for, or is not over
    reader: type[Reader] = field(default=Reader, repr=False)  # a view of the last steps need not read all
    _checked: tuple[int, int] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self._launcher = Reader(RunDirectory(self.path).events)

    def refresh(self) -> int:
        """Reads what is new; returns how many events there were."""
        self.about = _object_in(RunDirectory(self.path).record)
        self._read_findings(self.path / "findings.jsonl")
        self.checked = _object_in(self.path / "checked.json") or None
        new = list(self._launcher.events())
        self.launcher_events += new
        for file in sorted(self.path.glob("[0-9]*/*/**/rank*.events.jsonl")):
            self._open(file)
        count = len(new) + sum(log.take() for log in self.ranks.values())
        _align(self.ranks)
        return count

    def _read_findings(self, file: Path) -> None:
        about = file.stat() if file.exists() else None
        stamp = None if about is None else (about.st_size, about.st_mtime_ns)
        if stamp != self._checked:
            self._checked, self.findings = stamp, list(_objects_in(file))

    def _open(self, file: Path) -> None:
        attempt, host = file.relative_to(self.path).parts[:2]
        number = file.name[len("rank") : -len(".events.jsonl")]
        if not (attempt.isdecimal() and number.isdecimal()):
            return
        key = int(attempt), int(number)
        known = self.ranks.get(key)
        # A script that has started ranks by itself is none of them, though it has a number, and a file.
        if known is None or len(file.parts) > len(known.reader.path.parts):
            self.ranks[key] = RankLog(key[1], key[0], host, file.parent, reader=self.reader(file))

    @property
    def problems(self) -> list[str]:
        """What could not be read, a line each."""
        readers = [*(log.reader for log in self.ranks.values()), self._launcher]
        lines = [f"{one.path.name}: {one.torn} lines that are no events were left out" for one in readers if one.torn]
        if self.path.joinpath("run.json").exists() and not self.about:
            lines.append("run.json is cut, or no JSON: what was run, and how it ended, is not known")
        lines += [
            f"{one.path.name} has lines of version {one.newer}: a later samestep wrote them, and they were left out"
            for one in readers
            if one.newer is not None
        ]
        lost = sum(log.dropped for log in self.ranks.values())
        return lines + ([f"the ranks had no room for {lost} lines"] if lost else [])

    @property
    def attempts(self) -> list[int]:
        return sorted({attempt for attempt, _ in self.ranks})

    def attempt(self, number: int) -> list[RankLog]:
        return [log for (attempt, _), log in sorted(self.ranks.items()) if attempt == number]

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come: the launcher, or every rank, has said so."""
        if self.about:
            return self.about.get("ended") is not None
        return bool(self.ranks) and all(log.end is not None for log in self.attempt(self.attempts[-1]))


def open_run(path: Path, reader: type[Reader] = Reader) -> Run:
    """Returns what a run directory says by now."""
    run = Run(path, reader=reader)
    try:
        if not path.exists():
            raise UsageError(f"there is no run directory {path}: `samestep run` says where a run's logs lie")
        if not path.is_dir():
            raise UsageError(f"{path} is a file: name the run directory, such as runs/train-20260101-120000-1a2b")
        run.refresh()
    except OSError as error:
        raise UsageError(f"{error.filename or path} cannot be read: {error.strerror}") from error
    if not run.about and not run.ranks:
        hint = "" if (found := _newest(path)) is None else f"; the newest run in it is {found}"
        raise UsageError(f"{path} is no run directory: neither run.json nor events of a rank are in it{hint}")
    return run


def latest_run(runs: Path) -> Path:
    """Returns the run directory in `runs` that has begun, or ended, last."""
    found = _newest(runs)
    if found is None:
        raise UsageError(f"there is no run in ./{runs}: name a run directory, or start a run with `samestep run`")
    return found


def _newest(runs: Path) -> Path | None:
    record = max(runs.glob("*/run.json"), key=lambda each: each.stat().st_mtime, default=None)
    return None if record is None else record.parent


def measured(value: Any) -> float:
    """Returns a number that one can count with; 0 for what is none.

    >>> measured(1.5), measured(None), measured(float("nan")), measured(10**400)
    (1.5, 0.0, 0.0, 1000000000000.0)
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(min(value, _MOST)) if is_number and value > 0 else 0.0


def instant(moment: float) -> float:
    """Returns a time since 1970 as one can count with.

    >>> instant(1.5), instant(float("nan")), instant(10**400)
    (1.5, 0.0, 100000000000.0)
    """
    return float(min(moment, _LAST)) if moment > 0 else 0.0


def json_safe(value: Any) -> Any:
    r"""Returns data without what JSON does not know: numbers that are none are null; and texts that nothing obeys.

    >>> json_safe({"a": [1.5, float("nan"), "b\x00"]})
    {'a': [1.5, None, 'b\\x00']}
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return value if value.isprintable() else escape_lines(value)
    if isinstance(value, Mapping):
        return {escape_control(key): json_safe(each) for key, each in value.items()}
    return [json_safe(each) for each in value] if isinstance(value, list | tuple) else value


def number_of(value: float | str) -> float:
    """Returns a logged value as a number; "nan", "inf" and "-inf" are texts in the file.

    >>> number_of("inf"), number_of(2), number_of(10**400)
    (inf, 2.0, inf)
    """
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _align(ranks: dict[tuple[int, int], RankLog]) -> None:
    """Finds how far the hosts' clocks are apart: their steps end together, as far as all wait for all."""
    for attempt in {attempt for attempt, _ in ranks}:
        logs = {rank: log for (number, rank), log in sorted(ranks.items()) if number == attempt}
        first = next(iter(logs.values()))
        offsets: dict[str, float] = {first.host: 0.0}
        ends = _ends(first)
        for log in logs.values():
            if log.host not in offsets and (
                differences := [end - ends[step] for step, end in _ends(log).items() if step in ends]
            ):
                offsets[log.host] = median(differences)
        for log in logs.values():
            log.clock_offset = offsets.get(log.host, 0.0)


def _ends(log: RankLog) -> dict[int, float]:
    """Returns when the steps ended that have lines, by the rank's own clock."""
    return {line["step"]: line["t"] + line["seconds"] for line in log.steps[:200] if line["steps"]}


def _object_in(file: Path) -> Event:
    return next(_objects_in(file, whole=True), {})


def _objects_in(file: Path, *, whole: bool = False) -> Iterator[Event]:
    """Yields the JSON objects of a file: of its lines, or the one that it is."""
    try:
        with file.open("rb") as opened:
            data = opened.read(_LARGEST)
    except FileNotFoundError:
        return
    for text in [data] if whole else data.splitlines():
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            continue  # half-written
        if isinstance(found, dict):
            yield found


def last(log: RankLog) -> float:
    """Returns when a rank was last heard of, on its own clock."""
    times = [log.end["t"]] if log.end else []
    times += [line["t"] + measured(line["seconds"]) for line in log.steps[-1:]]
    return float(max([*times, log.begin.get("t", 0.0)]))


# --- many steps in little memory ---------------------------------------------------------------------------------
#
# A run of 64 ranks and 10,000 steps has 640,000 lines. As json gives it, a line of 600 bytes takes 5.3 kB: lists of
# lists, and a new "forward" for each line that says so. Packed it takes 2.2: pieces and buckets are bytes until
# somebody wants them, and a name is one object for all lines.


class Packed(Sequence[Any]):
    """A list that is kept as bytes; only this process makes and reads them.

    >>> list(Packed([["forward", 0, 12]]))
    [['forward', 0, 12]]
    """

    __slots__ = ("_bytes", "_length")

    def __init__(self, values: list[Any]) -> None:
        self._bytes, self._length = marshal.dumps(values), len(values)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        return iter(marshal.loads(self._bytes))  # noqa: S302

    def __getitem__(self, place: Any) -> Any:
        return list(self)[place]


class PackingReader(Reader):
    """Reads events, and packs what is large in them."""

    def events(self) -> Iterator[dict[str, Any]]:
        for event in super().events():
            event["t"] = instant(event["t"])
            if event["kind"] == "step":
                event = {intern(name): value for name, value in event.items()}
                for part in ("spent", "work"):
                    event[part] = {intern(name): value for name, value in event[part].items()}
                for part in ("spans", "buckets"):
                    event[part] = Packed(event[part])
            yield event


# --- the last steps of a run that goes on ---------------------------------------------------------------------

LOOK = 20  # lines of steps that are looked back on


@dataclass(frozen=True)
class RecentSteps:
    """The last steps of a rank."""

    steps: int = 0  # how many they are
    seconds: float = 0.0  # of one of them, as far as it was training; 0 where nothing is known
    # seconds by phase, in their order; evaluate, save and load only where the rank has just been in one
    spent: dict[str, float] = field(default_factory=dict)
    samples: float = 0.0  # that this rank has taken in the last of them


def recent_steps(log: RankLog) -> RecentSteps:
    """Returns the pace of a rank; its first step, which warms up, counts only while it is the only one."""
    lines = list(islice((line for line in reversed(log.steps[1:]) if line["steps"]), LOOK)) or log.steps[:1]
    steps = sum(line["steps"] for line in lines)
    if not 0 < steps < 1e12:
        return RecentSteps()
    spent = dict.fromkeys(PHASES, 0.0)
    for line in lines:
        for name, seconds in line["spent"].items():
            if name in spent:
                spent[name] += measured(seconds)
    trained = sum(measured(line["seconds"]) for line in lines) - sum(spent[name] for name in NON_TRAINING)
    now = log.steps[-1]["spent"] if log.end is None else {}
    spent |= {name: measured(now.get(name)) for name in NON_TRAINING}
    spent = {name: seconds for name, seconds in spent.items() if seconds}
    return RecentSteps(steps, max(0.0, trained) / steps, spent, measured(lines[0]["work"].get("samples")))


def largest_remainder(spent: Mapping[str, float], width: int) -> dict[str, int]:
    """Returns how many of `width` cells each phase gets: largest remainders, so that all are used.

    >>> largest_remainder({"forward": 1.0, "backward": 2.0, "wait": 0.01}, 10)
    {'forward': 3, 'backward': 7}
    """
    total = sum(spent.values())
    if total <= 0 or width <= 0:
        return {}
    exact = {name: width * seconds / total for name, seconds in spent.items()}
    cells = {name: int(share) for name, share in exact.items()}
    by_remainder = sorted(exact, key=lambda name: cells[name] - exact[name])
    for name in by_remainder[: width - sum(cells.values())]:
        cells[name] += 1
    return {name: count for name, count in cells.items() if count}
