"""What shows from outside how a rank is: whether its record moves, whether it computes, what the kernel says of it.

    its progress record      steps, phases, collectives entered and left       moved
    /proc/PID/stat, io       processor time, bytes read and written            active; its DataLoader's workers count
    /proc/PID/stat           R runs, S sleeps, D waits for a disk, T frozen    state

Told to the head: once a second the pulse of ranks that stand still, and the pace of those that step after every step,
or every 50 ms. No thread of a rank is asked: it may hold the interpreter's lock, or be frozen.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from samestep.launch.loop import Loop
from samestep.launch.process import children, stat_of
from samestep.progress import Progress

__all__: list[str] = []

PERIOD = 1.0  # seconds between two looks at pulses, and at most between two at paces
QUICK = 0.05  # at least
STILL = 1.0  # seconds without a move after which it is told
COMPUTES = 0.1  # of one core, beyond what threads that wait for messages use
READS = 1 << 14  # bytes a second, read or written; a slow network's are among them
SLEPT = 5.0  # seconds between two looks after which this process itself has been stopped, and its ranks with it
BACKWARD = "the all-reduce of a backward pass"
_KEPT = 200  # steps whose durations are kept


@dataclass(frozen=True, kw_only=True)
class RankHeartbeat:
    """How one rank is.

    Attributes:
        rank: which.
        pid: its process.
        step: optimizer steps finished.
        still: seconds since its record moved.
        idle: seconds since it, or a child of it, has computed, read or written.
        state: the kernel's letter for its main thread.
        entered: collectives entered.
        operation: the collective in which it stands, BACKWARD for those of a backward pass; "" outside of any.
        site: where the script called it.
        phase: as in its record.
        usual: seconds that 99 of 100 of its steps do not exceed.
    """

    rank: int
    pid: int
    step: int
    still: float
    idle: float
    state: str
    entered: int
    operation: str
    site: str
    phase: str
    usual: float


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How far a rank is, and where its time has gone: seconds, since it began, up to the end of its last step.

    Attributes:
        rank: which.
        step: optimizer steps finished.
        at: when the last of them was, on its host's monotonic clock.
        waited: for other ranks.
        data: waiting for data.
        non_training: in evaluations, saves and loads.
        load: no seconds: the samples, tokens or numbers that it has worked on.
    """

    rank: int
    step: int
    at: float
    waited: float
    data: float
    non_training: float
    load: float = 0.0


@dataclass
class _Seen:
    """What was known of a rank at the last look; times are of the monotonic clock, in seconds."""

    record: tuple[object, ...] = ()
    moved: float = 0.0
    active: float = 0.0
    looked: float = 0.0
    computed: float = 0.0
    transferred: int = 0
    step: int = 0
    stepped: float | None = None
    durations: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    told: bool = False


class Pulses:
    """Feels the pulse of the ranks of one host.

    Args:
        loop: what waits.
        ranks: returns process and progress record of every rank that has not ended.
        tell: is given the kind of every message, "pulse" or "pace", and its fields.
    """

    def __init__(
        self,
        loop: Loop,
        ranks: Callable[[], Mapping[int, tuple[int, Progress]]],
        tell: Callable[[str, dict[str, Any]], None],
    ) -> None:
        self._loop, self._ranks, self._tell = loop, ranks, tell
        self._seen: dict[int, _Seen] = {}
        self._paces: dict[int, tuple[Pace, float]] = {}  # with the seconds of a step
        self._looked = time.monotonic()
        self._look()
        self._follow()

    def _look(self) -> None:
        self._loop.at(PERIOD, self._look)
        now, ranks = time.monotonic(), self._ranks()
        slept, self._looked = now - self._looked > SLEPT, now
        self._seen = {rank: self._seen.get(rank, _Seen(moved=now, active=now)) for rank in ranks}
        for rank, (pid, record) in ranks.items():
            seen = self._seen[rank]
            state = _note(seen, pid, record, now)
            if slept:
                seen.moved = seen.active = now
            still = now - seen.moved
            if still >= STILL or seen.told:
                seen.told = still >= STILL
                self._tell("pulse", asdict(_pulse(rank, pid, record, seen, state, now)))

    def _follow(self) -> None:
        """Tells the pace of those that have stepped; looks again after half a step of the quickest."""
        soon, before, self._paces = PERIOD, self._paces, {}
        for rank, (_, record) in self._ranks().items():
            if record.changed is None:
                continue
            pace = _pace(rank, record, record.changed)
            known, seconds = before.get(rank, (None, QUICK))
            if known is None or pace.step != known.step:
                self._tell("pace", asdict(pace))
            if known is not None and pace.step > known.step:
                seconds = (pace.at - known.at) / (pace.step - known.step)
            self._paces[rank] = pace, seconds
            soon = min(soon, seconds / 2)
        self._loop.at(max(QUICK, soon), self._follow)


def _pulse(rank: int, pid: int, record: Progress, seen: _Seen, state: str, now: float) -> RankHeartbeat:
    durations = sorted(seen.durations)
    return RankHeartbeat(
        rank=rank,
        pid=pid,
        step=record.step,
        still=now - seen.moved,
        idle=now - seen.active,
        state=state,
        entered=record.entered,
        operation=record.operation if record.in_collective else BACKWARD if record.phase == "wait" else "",
        site=record.site if record.in_collective else "",
        phase=record.phase,
        usual=durations[int(0.99 * (len(durations) - 1))] if durations else 0.0,
    )


def _pace(rank: int, record: Progress, at: float) -> Pace:
    spent = {"waited": record.waited, "data": record.data, "non_training": record.non_training, "load": record.load}
    return Pace(rank=rank, step=record.step, at=at, **spent)


def _note(seen: _Seen, pid: int, record: Progress, now: float) -> str:
    """Takes down what has changed since the last look; returns the kernel's letter."""
    place = (record.step, record.entered, record.left, record.phase, record.phase_since)
    if place != seen.record:
        seen.record, seen.moved = place, now
    if record.step != seen.step and record.changed is not None:
        if seen.stepped is not None and record.step > seen.step:
            seen.durations.append((record.changed - seen.stepped) / (record.step - seen.step))
        seen.step, seen.stepped = record.step, record.changed
    state, computed = stat_of(pid)
    transferred = _transferred(pid)
    for child in children(pid):
        computed += stat_of(child)[1]
        transferred += _transferred(child)
    seconds = now - seen.looked
    busy = abs(computed - seen.computed) > COMPUTES * seconds  # less where a child has ended
    if busy or abs(transferred - seen.transferred) > READS * seconds:
        seen.active = now
    seen.looked, seen.computed, seen.transferred = now, computed, transferred
    return state


def _transferred(pid: int) -> int:
    """Returns the bytes that a process has read and written; 0 where the kernel does not tell."""
    with suppress(OSError, ValueError):
        lines = Path(f"/proc/{pid}/io").read_text(encoding="ascii").splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar")))
    return 0
