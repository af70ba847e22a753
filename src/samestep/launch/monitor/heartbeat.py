"""How a rank is, seen from outside: progress from its record; activity and state from /proc.

No thread of a rank is asked: it may hold the interpreter's lock, or be frozen.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from samestep.launch.event_loop import Loop
from samestep.launch.process import children, stat_of, threads
from samestep.progress import Progress

PERIOD_S = 1.0  # between two heartbeats, and at most between two timings
SHORTEST_S = 0.05  # between two timings
NO_PROGRESS_S = 1.0  # after which a heartbeat is sent
COMPUTES = 0.1  # of one core, beyond what threads that wait for messages use
READS = 1 << 14  # bytes a second, read or written; a slow network's are among them
SUSPENDED_S = 5.0  # between two looks, after which this process itself has been stopped, and its ranks with it
BACKWARD = "the all-reduce of a backward pass"
REACTOR = "TP_SHM_reactor"  # TensorPipe's name of its thread
_KEPT = 200  # steps whose durations are kept


@dataclass(frozen=True, kw_only=True)
class RankHeartbeat(Progress):
    """What a rank's record says, and how its process is.

    Its operation is BACKWARD in the collectives of a backward pass; "" as its site outside of any.
    """

    rank: int
    pid: int
    since_progress: float  # seconds since its record changed
    since_activity: float  # seconds since it, or a child of it, has computed, read or written
    state: str  # the kernel's letter for its main thread
    p99_step: float  # seconds that 99 of 100 of its steps do not exceed


@dataclass(frozen=True, kw_only=True)
class StepTiming:
    """How far a rank is, and where its time has gone: seconds, since it began, up to the end of its last step."""

    rank: int
    step: int  # optimizer steps finished
    at: float  # when the last of them was, on its host's monotonic clock
    waited: float  # for other ranks
    data: float  # waiting for data
    non_training: float  # in evaluations, saves and loads
    load: float = 0.0  # no seconds: the samples, tokens or numbers that it has worked on


@dataclass
class _Seen:
    """What was known of a rank at the last look; times are of the monotonic clock, in seconds."""

    record: tuple[object, ...] = ()
    progressed: float = 0.0
    active: float = 0.0
    looked: float = 0.0
    computed: float = 0.0
    transferred: int = 0
    step: int = 0
    stepped: float | None = None
    durations: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    reported: bool = False


class HeartbeatMonitor:
    """Sends heartbeats and timings of the ranks of one host; `ranks` returns those alive, with process and record."""

    def __init__(
        self,
        loop: Loop,
        ranks: Callable[[], Mapping[int, tuple[int, Progress]]],
        send: Callable[[str, dict[str, Any]], None],
    ) -> None:
        self._loop, self._ranks, self._send = loop, ranks, send
        self._seen: dict[int, _Seen] = {}
        self._timings: dict[int, tuple[StepTiming, float]] = {}  # with the seconds of a step
        self._looked = time.monotonic()
        self._send_heartbeats()
        self._send_timings()

    def _send_heartbeats(self) -> None:
        self._loop.at(PERIOD_S, self._send_heartbeats)
        now, ranks = time.monotonic(), self._ranks()
        suspended, self._looked = now - self._looked > SUSPENDED_S, now
        self._seen = {rank: self._seen.get(rank, _Seen(progressed=now, active=now)) for rank in ranks}
        for rank, (pid, record) in ranks.items():
            seen = self._seen[rank]
            state = _update(seen, pid, record, now)
            if suspended:
                seen.progressed = seen.active = now
            stuck = now - seen.progressed >= NO_PROGRESS_S
            if stuck or seen.reported:
                seen.reported = stuck
                self._send("heartbeat", asdict(_heartbeat(rank, pid, record, seen, state, now)))

    def _send_timings(self) -> None:
        """Sends the timing of those that have stepped; looks again after half a step of the fastest."""
        soonest, before, self._timings = PERIOD_S, self._timings, {}
        for rank, (_, record) in self._ranks().items():
            if record.changed is None:
                continue
            timing = StepTiming(
                rank=rank,
                step=record.step,
                at=record.changed,
                waited=record.waited,
                data=record.data,
                non_training=record.non_training,
                load=record.load,
            )
            known, seconds = before.get(rank, (None, SHORTEST_S))
            if known is None or timing.step != known.step:
                self._send("step_timing", asdict(timing))
            if known is not None and timing.step > known.step:
                seconds = (timing.at - known.at) / (timing.step - known.step)
            self._timings[rank] = timing, seconds
            soonest = min(soonest, seconds / 2)
        self._loop.at(max(SHORTEST_S, soonest), self._send_timings)


def _heartbeat(rank: int, pid: int, record: Progress, seen: _Seen, state: str, now: float) -> RankHeartbeat:
    durations = sorted(seen.durations)
    if not record.in_collective:
        record = replace(record, operation=BACKWARD if record.phase == "wait" else "", site="")
    return RankHeartbeat(
        **vars(record),
        rank=rank,
        pid=pid,
        since_progress=now - seen.progressed,
        since_activity=now - seen.active,
        state=state,
        p99_step=durations[int(0.99 * (len(durations) - 1))] if durations else 0.0,
    )


def _update(seen: _Seen, pid: int, record: Progress, now: float) -> str:
    """Takes down what has changed since the last look; returns the kernel's letter."""
    place = (record.step, record.entered, record.left, record.phase, record.phase_since, record.calls)
    if place != seen.record:
        seen.record, seen.progressed = place, now
    if record.step != seen.step and record.changed is not None:
        if seen.stepped is not None and record.step > seen.step:
            seen.durations.append((record.changed - seen.stepped) / (record.step - seen.step))
        seen.step, seen.stepped = record.step, record.changed
    state, computed = stat_of(pid)
    transferred = _transferred(pid)
    if record.calls:
        computed -= _polling(pid)
    for child in children(pid):
        computed += stat_of(child)[1]
        transferred += _transferred(child)
    seconds = now - seen.looked
    busy = abs(computed - seen.computed) > COMPUTES * seconds  # less where a child has ended
    if busy or abs(transferred - seen.transferred) > READS * seconds:
        seen.active = now
    seen.looked, seen.computed, seen.transferred = now, computed, transferred
    return state


def _polling(pid: int) -> float:
    """Returns the processor seconds of the thread in which torch.distributed.rpc polls shared memory all the time."""
    for thread in threads(pid):
        with suppress(OSError):
            if (thread / "comm").read_text(encoding="utf-8", errors="replace").strip() == REACTOR:
                return stat_of(f"{pid}/task/{thread.name}")[1]
    return 0.0


def _transferred(pid: int) -> int:
    """Returns the bytes that a process has read and written; 0 where the kernel does not tell."""
    with suppress(OSError, ValueError):
        lines = Path(f"/proc/{pid}/io").read_text(encoding="ascii").splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar")))
    return 0
