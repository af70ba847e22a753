"""Waits for a run to hang, or for a rank to fall behind, and then says once what it has found.

    all ranks still for long enough ── diagnosis ──▶ ask for stacks ── 0.5 s ──▶ collect them ── 2 s ──▶ say it
      a rank moves again ──▶ say that it goes on                                               and stop, or wait

The signal that asks may wake a rank out of a system call: it is looked at once more before anything is said.

It lives in the head, beside the supervisor and outside of every rank: what holds a rank's interpreter does not hold it.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from samestep.launch.failure import FailureRecord
from samestep.launch.flight import Flight, missing
from samestep.launch.flight import lines as recorder_lines
from samestep.launch.hang import FROZEN, HANG_AFTER_S, Hang, diagnose, is_doubtful, told
from samestep.launch.loop import Alarm, Loop
from samestep.launch.pulse import Pace, RankHeartbeat
from samestep.launch.stragglers import Stragglers

__all__: list[str] = []

STOPPED = 124  # what timeout(1) ends with
PERIOD = 1.0  # seconds between two looks
QUICK = 0.1  # seconds between two looks for slow ranks at least
IDLE = 20.0  # times as long as such a look takes this process does other things, or nothing
ANSWER = 0.5  # seconds for stacks to be written
AGAIN = 5.0  # seconds until the flight recorders are asked once more
SETTLED = 2.0  # seconds for them to arrive, and the next pulses with them

OnHang = Literal["auto", "stop", "wait"]
Note = Callable[[str, int, str, Sequence[int]], None]


class Watchdog:
    """Watches one attempt of a run.

    Args:
        loop: what waits.
        running: returns the ranks that have not ended; none while they are being ended.
        order: passes an order on to ranks.
        say: shows a line to the person who has started the run.
        note: writes an event down: its kind, the step, the text and the ranks that it is about.
        show: lets the ranks' own progress display show how they stand.
        stop: ends the run for this reason.
        least: seconds without a move that are no hang.
        on_hang: "stop" ends the run, "wait" does not, "auto" ends what cannot go on by itself.
        machines: that the ranks are on; on a single one no network is blamed.
        logs: where stacks are kept, for a person.
    """

    def __init__(
        self,
        loop: Loop,
        running: Callable[[], Sequence[int]],
        order: Callable[[str, Sequence[int]], None],
        say: Callable[[str], None],
        stop: Callable[[FailureRecord], None],
        note: Note = lambda *_: None,
        show: Callable[[str], None] = lambda _: None,
        *,
        least: float = HANG_AFTER_S,
        on_hang: OnHang = "auto",
        machines: int = 1,
        logs: str = "",
    ) -> None:
        self._loop, self._running, self._order = loop, running, order
        self._say, self._stop, self._note, self._show = say, stop, note, show
        self._shown = ""
        self._least, self._on_hang, self._machines, self._logs = least, on_hang, machines, logs
        self._pulses: dict[int, RankHeartbeat] = {}
        self._standing: dict[int, str] = {}
        self._flights: dict[int, list[Flight]] = {}
        self._hosts: dict[int, str] = {}
        self._steps: dict[int, int] = {}  # that each rank has finished
        self._stragglers = Stragglers()
        self._asked = -AGAIN  # when the flight recorders were, while all ranks compute
        self._since: float | None = None  # when the last rank moved, once a hang is being examined
        self._telling: Alarm | None = None  # when it is told
        self._told = False
        self._closed = False
        self._compare()
        self._look()

    def close(self) -> None:
        """Watches no more."""
        self._closed = True

    def hear(self, host: str, kind: str, body: dict[str, Any]) -> None:
        """Takes a rank's pulse, its pace, or what its flight recorder knows."""
        self._hosts[body["rank"]] = host
        if "step" in body:
            self._steps[body["rank"]] = body["step"]
        if kind == "flight":
            self._flights[body["rank"]] = [Flight(rank=body["rank"], **each) for each in body["flights"]]
        elif kind == "pulse":
            self._pulses[body["rank"]] = RankHeartbeat(**body)
        else:
            self._stragglers.hear(Pace(**body))

    def stands(self, rank: int, line: str | None) -> None:
        """Takes a rank's own line, out of its stacks."""
        if line is not None:
            self._standing[rank] = line

    def _compare(self) -> None:
        if self._closed:
            return
        began = time.monotonic()
        for kind, ranks, line in self._stragglers.found(self._running(), began):
            if kind != "network" or self._machines > 1:  # within one ranks wait for cores
                self._tell_of(kind, ranks, line)
        self._loop.at(max(QUICK, IDLE * (time.monotonic() - began)), self._compare)

    def _look(self) -> None:
        if self._closed:
            return
        self._loop.at(PERIOD, self._look)
        self._show_standing()
        if not self._running():
            self._pulses.clear()
        pulses = self._known()
        self._doubt(pulses)
        hang = self._diagnosed(pulses)
        if hang is not None and self._since is None:
            self._since = time.monotonic() - hang.still
            self._standing.clear()
            self._flights.clear()
            self._order("flight", list(pulses))
            self._order("ask", [rank for rank, pulse in pulses.items() if pulse.state not in FROZEN])
            self._loop.at(ANSWER, lambda: self._order("waiting", list(pulses)))
            self._telling = self._loop.at(ANSWER + SETTLED, self._tell)
        elif hang is None and self._since is not None and pulses:
            if self._told:
                self._tell_of("moves", [], f"progress again after {time.monotonic() - self._since:.0f} s")
            self._forget_hang()

    def _forget_hang(self) -> None:
        if self._telling is not None:
            self._telling.cancel()  # else a second one, found soon after, would be told twice
        self._since, self._telling, self._told = None, None, False

    def _diagnosed(self, pulses: Mapping[int, RankHeartbeat]) -> Hang | None:
        return diagnose(list(pulses.values()), self._least, missing(self._told_of(pulses)))

    def _told_of(self, pulses: Mapping[int, RankHeartbeat]) -> list[Flight]:
        """What the flight recorders of these ranks have told."""
        return [each for rank in pulses for each in self._flights.get(rank, ())]

    def _doubt(self, pulses: Mapping[int, RankHeartbeat]) -> None:
        """Asks the flight recorders where the pulses alone cannot tell who waits."""
        if self._since is not None:
            return
        if not is_doubtful(list(pulses.values()), self._least):
            self._flights.clear()
            self._asked = -AGAIN
        elif time.monotonic() - self._asked >= AGAIN:
            self._asked = time.monotonic()
            self._order("flight", list(pulses))

    def _show_standing(self) -> None:
        standing = self._stragglers.standing(self._running())
        if standing != self._shown:
            self._shown = standing
            self._show(standing)

    def _tell_of(self, kind: str, ranks: Sequence[int], text: str) -> None:
        self._say(text)
        self._note(kind, min(self._steps.values(), default=0), text, ranks)

    def _known(self) -> dict[int, RankHeartbeat]:
        """The pulses of all ranks that have not ended; none where one has none, for it moves."""
        running = self._running()
        known = {rank: self._pulses[rank] for rank in running if rank in self._pulses}
        return known if len(known) == len(running) else {}

    def _tell(self) -> None:
        pulses = self._known()
        hang = self._diagnosed(pulses)
        if self._closed or hang is None:
            self._forget_hang()  # it has moved in the meantime
            return
        self._told = True
        lines = told(hang, pulses, self._standing)
        lines += [f"    {line}" for line in recorder_lines(self._told_of(pulses))]
        stops = hang.certain if self._on_hang == "auto" else self._on_hang == "stop" and not hang.early
        lines.append(f"    all Python stacks: {self._logs}/rank*.stacks")
        if stops:
            lines.append("    deadlock: stopping the run (--on-hang wait keeps it)")
            if self._on_hang == "stop":
                lines[-1] = f"    the run is stopped, with exit code {STOPPED}"
        elif hang.early:
            lines.append(
                "    before the second step much takes long that is right, so it is waited for: Ctrl-C ends it"
            )
        else:
            lines.append("    still waiting; stop it with Ctrl-C, or run with --on-hang stop")
        self._tell_of("hang", hang.culprits, "\n".join(lines))
        if stops:
            self._stop(self._failure(hang, pulses[hang.culprits[0]], lines[0]))

    def _failure(self, hang: Hang, pulse: RankHeartbeat, message: str) -> FailureRecord:
        standing = self._standing.get(pulse.rank, pulse.site or None)
        where, _, source = (None, "", None) if standing is None else standing.partition("  ")
        return FailureRecord(
            rank=hang.culprits[0],
            pid=pulse.pid,
            host=self._hosts.get(pulse.rank, socket.gethostname()),
            exception="Hang",
            message=message,
            exit_code=STOPPED,
            time=time.time(),
            where=where,
            source=source,
        )
