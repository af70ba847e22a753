"""Watches a run for hangs and slow ranks, and reports each once.

It runs in the controller, outside of every rank: what holds a rank's interpreter does not hold it.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from samestep.launch.event_loop import Alarm, Loop
from samestep.launch.monitor.flight_recorder import CollectiveRecord, ranks_behind, recorder_lines
from samestep.launch.monitor.hang import FROZEN, HANG_AFTER_S, Hang, describe_hang, diagnose, is_doubtful
from samestep.launch.monitor.heartbeat import RankHeartbeat, StepTiming
from samestep.launch.monitor.stragglers import Stragglers
from samestep.launch.rank.failure import FailureRecord

STOPPED = 124  # what timeout(1) ends with
PERIOD_S = 1.0  # between two looks
SHORTEST_S = 0.1  # between two looks for slow ranks at least
IDLE = 20.0  # times as long as such a look takes this process does other things, or nothing
STACKS_S = 0.5  # for stacks to be written by a thread of the rank, and then for faulthandler to write them
ASK_AGAIN_S = 5.0  # until the flight recorders are asked once more
SETTLED_S = 2.0  # for them to arrive, and the next heartbeats with them

OnHang = Literal["auto", "stop", "wait"]
Note = Callable[[str, int, str, Sequence[int]], None]


@dataclass
class Watchdog:
    """Watches one attempt of a run.

    `running` returns the ranks that have not ended, none while they are being ended; `positions` are the lines that
    they were at when asked last; `note` writes an event down: its kind, the step, the text and the ranks; `least` are
    seconds without progress that are no hang; `on_hang` "auto" ends what cannot go on by itself; on a single one of
    `machines` no network is blamed.
    """

    loop: Loop
    running: Callable[[], Sequence[int]]
    command: Callable[[str, Sequence[int]], None]
    say: Callable[[str], None]
    stop: Callable[[FailureRecord], None]
    positions: dict[int, str]
    note: Note = lambda *_: None
    show_pace: Callable[[str], None] = lambda _: None
    least: float = HANG_AFTER_S
    on_hang: OnHang = "auto"
    machines: int = 1
    logs: str = ""

    def __post_init__(self) -> None:
        self._pace = ""
        self._heartbeats: dict[int, RankHeartbeat] = {}
        self._collectives: dict[int, list[CollectiveRecord]] = {}
        self._hosts: dict[int, str] = {}
        self._steps: dict[int, int] = {}  # that each rank has finished
        self._stragglers = Stragglers()
        self._requested = -ASK_AGAIN_S  # when the flight recorders were, while all ranks compute
        self._since: float | None = None  # when the last rank progressed, once a hang is being examined
        self._report: Alarm | None = None  # when it is reported
        self._reported = False
        self._closed = False
        self._compare()
        self._look()

    def close(self) -> None:
        self._closed = True

    def on_message(self, host: str, kind: str, body: dict[str, Any]) -> None:
        rank = body["rank"]
        self._hosts[rank] = host
        if "step" in body:
            self._steps[rank] = body["step"]
        if kind == "flight":
            self._collectives[rank] = [CollectiveRecord(rank=rank, **each) for each in body["collectives"]]
        elif kind == "heartbeat":
            self._heartbeats[rank] = RankHeartbeat(**body)
        else:
            self._stragglers.add(StepTiming(**body))

    def _compare(self) -> None:
        if self._closed:
            return
        began = time.monotonic()
        for kind, ranks, line in self._stragglers.found(self.running(), began):
            if kind != "network" or self.machines > 1:  # within one ranks wait for cores
                self._tell(kind, ranks, line)
        self.loop.at(max(SHORTEST_S, IDLE * (time.monotonic() - began)), self._compare)

    def _look(self) -> None:
        if self._closed:
            return
        self.loop.at(PERIOD_S, self._look)
        pace = self._stragglers.pace_summary(self.running())
        if pace != self._pace:
            self._pace = pace
            self.show_pace(pace)
        if not self.running():
            self._heartbeats.clear()
        known = self._known()
        self._ask_recorders(known)
        hang = self._diagnose(known)
        if hang is not None and self._since is None:
            self._since = time.monotonic() - hang.since_progress
            self.positions.clear()
            self._collectives.clear()
            self.command("flight", list(known))
            able = [rank for rank, each in known.items() if each.state not in FROZEN]
            self.command("write_stacks", able)
            self.loop.at(STACKS_S, lambda: self.command("dump_stacks", able))
            self.loop.at(2 * STACKS_S, lambda: self.command("position", list(known)))
            self._report = self.loop.at(2 * STACKS_S + SETTLED_S, self._report_hang)
        elif hang is None and self._since is not None and known:
            if self._reported:
                self._tell("moves", [], f"progress again after {time.monotonic() - self._since:.0f} s")
            self._forget_hang()

    def _forget_hang(self) -> None:
        if self._report is not None:
            self._report.cancel()  # else a second one, found soon after, would be reported twice
        self._since, self._report, self._reported = None, None, False

    def _diagnose(self, known: Mapping[int, RankHeartbeat]) -> Hang | None:
        return diagnose(list(known.values()), self.least, ranks_behind(self._recorded(known)))

    def _recorded(self, ranks: Mapping[int, RankHeartbeat]) -> list[CollectiveRecord]:
        return [each for rank in ranks for each in self._collectives.get(rank, ())]

    def _ask_recorders(self, known: Mapping[int, RankHeartbeat]) -> None:
        """Asks the flight recorders where the heartbeats cannot tell which ranks wait."""
        if self._since is not None:
            return
        if not is_doubtful(list(known.values()), self.least):
            self._collectives.clear()
            self._requested = -ASK_AGAIN_S
        elif time.monotonic() - self._requested >= ASK_AGAIN_S:
            self._requested = time.monotonic()
            self.command("flight", list(known))

    def _tell(self, kind: str, ranks: Sequence[int], text: str) -> None:
        self.say(text)
        self.note(kind, min(self._steps.values(), default=0), text, ranks)

    def _known(self) -> dict[int, RankHeartbeat]:
        """The heartbeats of all ranks that have not ended; none where one has none, for it progresses."""
        running = self.running()
        known = {rank: self._heartbeats[rank] for rank in running if rank in self._heartbeats}
        return known if len(known) == len(running) else {}

    def _report_hang(self) -> None:
        known = self._known()
        hang = self._diagnose(known)
        if self._closed or hang is None:
            self._forget_hang()  # it has progressed in the meantime
            return
        self._reported = True
        lines = describe_hang(hang, known, self.positions, self._hosts if self.machines > 1 else None)
        lines += [f"    {line}" for line in recorder_lines(self._recorded(known))]
        stops = hang.certain if self.on_hang == "auto" else self.on_hang == "stop" and not hang.early
        lines.append(f"    all Python stacks: {self.logs}/rank*.stacks")
        if stops and self.on_hang == "stop":
            lines.append(f"    the run is stopped, with exit code {STOPPED}")
        elif stops:
            lines.append("    deadlock: stopping the run (--on-hang wait keeps it)")
        elif hang.early:
            lines.append(
                "    before the second step much takes long that is right, so it is waited for: Ctrl-C ends it"
            )
        else:
            lines.append("    still waiting; stop it with Ctrl-C, or run with --on-hang stop")
        self._tell("hang", hang.culprits, "\n".join(lines))
        if stops:
            self.stop(self._failure(hang, known[hang.culprits[0]], lines[0]))

    def _failure(self, hang: Hang, culprit: RankHeartbeat, message: str) -> FailureRecord:
        position = self.positions.get(culprit.rank, culprit.site or None)
        where, _, source = (None, "", None) if position is None else position.partition("  ")
        return FailureRecord(
            rank=culprit.rank,
            pid=culprit.pid,
            host=self._hosts.get(culprit.rank, socket.gethostname()),
            kind="deadlock" if hang.certain else "hang",
            exception="Hang",
            message=message,
            exit_code=STOPPED,
            time=time.time(),
            where=where,
            source=source,
        )
