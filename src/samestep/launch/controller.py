"""The controller of a run: gives every host's agent its ranks, takes their messages, and shows their output."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any, NoReturn, Self

from samestep.errors import SamestepError
from samestep.launch.event_loop import PASSED_ON, Alarm, Loop, signals
from samestep.launch.hosts.secure_link import AuthenticatedLink
from samestep.launch.link import Link, Message
from samestep.launch.local_ranks import Job
from samestep.launch.monitor.watchdog import Note, OnHang, Watchdog
from samestep.launch.output.console import MOST_HELD, Console
from samestep.launch.process import become_subreaper, kill_orphans, raise_file_limit
from samestep.launch.result import RunResult
from samestep.launch.start import early_agent
from samestep.launch.supervisor import Supervisor

HANG_UP_S = 2.0  # for the last messages to leave
HEARTBEAT_TIMEOUT_S = 10.0  # without a sign of life after which another host is lost
CLEANUP_S = 10.0  # for a host to say that nothing is left there


class AgentConnection:
    def __init__(self, host: str, link: Link, ranks: int, process: int | None = None) -> None:
        self.host = host
        self.process = process  # the agent's, where it is a child of this one
        self.address: str | None = None  # where it is, seen from here; None on this host
        self.local_address: str | None = None  # where this host is, seen from there
        self.link = link
        self.count = ranks
        self.ranks: tuple[int, ...] = ()
        self.answers: dict[str, dict[str, Any]] = {}
        self.last_message = time.monotonic()
        self.gone = False
        self.fault = ""  # why it is gone
        self.watch: Callable[[], None] = lambda: None  # called when the link may have something left to write

    def send(self, kind: str, **body: Any) -> None:
        """Sends one message; to a host that is gone, nothing."""
        if not self.gone:
            self.link.send({"kind": kind, **body})
            self.watch()

    def silence(self, *, running: bool) -> float:
        """Returns the seconds since a sign of life; one that imports torch, and runs nothing, cannot send any."""
        if not isinstance(self.link, AuthenticatedLink):
            return 0.0  # on this host, where the kernel reports its end
        return time.monotonic() - self.last_message if running else self.link.unacknowledged_s()

    def command(self, what: str, ranks: Sequence[int], number: int = 0) -> None:
        self.send("command", what=what, ranks=list(ranks), number=number)


class Interruption(Exception):  # noqa: N818  (not a mistake)
    """A signal came while no ranks ran; its number."""


def _interrupt(number: int) -> NoReturn:
    raise Interruption(number)


def host_name(link: AuthenticatedLink) -> str:
    """Returns what a host that has connected calls itself; its address where it does not say."""
    return str(link.peer_info.get("host") or link.address[0])


def connection_of(link: AuthenticatedLink) -> AgentConnection:
    host = AgentConnection(host_name(link), link, 0)
    host.address, host.local_address = link.address[0], link.local_address
    return host


def open_here(name: str, ranks: int) -> AgentConnection:
    """Starts an agent on this host, as a fork of this process, which must be single-threaded."""
    process, end = early_agent.claim(ranks) or early_agent.fork_agent()
    return AgentConnection(name, Link(end), ranks, process)


class Controller:
    """Holds the agents of all hosts, in the order of their ranks, for as long as the run lasts; a context manager."""

    def __init__(self, hosts: Sequence[AgentConnection]) -> None:
        self.hosts = list(hosts)
        self._loop = Loop()
        self._former: list[AgentConnection] = []  # lost hosts
        self._supervisor: Supervisor | None = None
        self._watchdog: Watchdog | None = None
        self._console: Console | None = None
        self._merging: Alarm | None = None
        self._paused = False  # the ranks' output is not read: the reader of ours is too slow
        self._is_between = False  # no ranks run, and a signal breaks off what is done meanwhile
        become_subreaper()
        raise_file_limit()
        for host in self.hosts:
            self._begin_with(host)
        self._check_silence()

    # --- before and after the ranks -----------------------------------------------------------------

    def prepare(self, jobs: Sequence[Job]) -> list[str]:
        """Lets every host import what its ranks need; returns what a person should know."""
        job_of = dict(zip(self.hosts, jobs, strict=True))
        answers = self.ask("prepare", "prepared", lambda host: {"job": asdict(job_of[host])})
        return list(dict.fromkeys(answer["note"] for answer in answers if answer["note"]))

    def ask(self, kind: str, answer: str, body: Callable[[AgentConnection], dict[str, Any]]) -> list[dict[str, Any]]:
        """Sends every host a message and returns their answers, in the order of the hosts."""
        for host in self.hosts:
            host.send(kind, **body(host))
        self._await(answer)
        return [host.answers.pop(answer) for host in self.hosts]

    def bind(self, address: str) -> int:
        """Returns the port of `address` that the first host now holds for the store."""
        first = self.hosts[0]
        first.send("bind", address=address)
        self._await("bound", [first])
        port: int = first.answers.pop("bound")["port"]
        return port

    def _await(self, kind: str, hosts: Sequence[AgentConnection] | None = None, seconds: float | None = None) -> None:
        until = None if seconds is None else time.monotonic() + seconds
        while any(kind not in host.answers and not host.gone for host in hosts or self.hosts):
            self._loop.turn(None if until is None else max(0.0, until - time.monotonic()))
            if until is not None and time.monotonic() >= until:
                return

    @contextmanager
    def between_attempts(self) -> Iterator[Loop]:
        """Yields the loop for what is to be done before, or between, attempts.

        Raises:
            Interruption: a signal has reached this process, or an agent, while the loop turned.
        """
        self._is_between = True
        try:
            with signals(self._loop, PASSED_ON, _interrupt):
                yield self._loop
        finally:
            self._is_between = False

    def replace(self, lost: AgentConnection, new: AgentConnection) -> None:
        self._former.append(lost)
        new.ranks = lost.ranks
        self.hosts[self.hosts.index(lost)] = new
        self._begin_with(new)

    def reopen(self, lost: AgentConnection) -> None:
        """Starts another agent on this host; what the lost one would have ended has come to us."""
        kill_orphans()
        lost.process = None  # reaped with them
        self.replace(lost, open_here(lost.host, lost.count))

    def forget_lost(self) -> None:
        self._former += [host for host in self.hosts if host.gone]
        self.hosts = [host for host in self.hosts if not host.gone]

    def discard_answers(self) -> None:
        """Forgets what hosts have answered, or are about to, when questions were broken off."""
        for host in self.hosts:
            host.send("close_probe")
        self._cleanup()
        for host in self.hosts:
            host.answers.clear()

    # --- an attempt ---------------------------------------------------------------------------------

    def run(
        self,
        jobs: Sequence[Job],
        console: Console,
        *,
        grace: float,
        hang_after: float,
        on_hang: OnHang,
        machines: int,
        note: Note,
    ) -> RunResult:
        """Runs one attempt: a job for each host; the other arguments are the supervisor's and the watchdog's."""
        for host, job in zip(self.hosts, jobs, strict=True):
            host.ranks = job.ranks
        self._console = console
        supervisor = self._supervisor = Supervisor(self._loop, self.hosts, self._loop.stop, grace=grace)
        self._watchdog = Watchdog(
            self._loop,
            lambda: [] if self._paused else supervisor.running(),  # a rank that waits for a full pipe makes no progress
            supervisor.command,
            console.tell,
            supervisor.on_hang,
            supervisor.positions,
            note,
            lambda text: self.hosts[0].send("pace", text=text),
            least=hang_after,
            on_hang=on_hang,
            machines=machines,
            logs=console.logs,
        )
        with signals(self._loop, (*PASSED_ON, signal.SIGWINCH), self._on_signal):
            for host, job in zip(self.hosts, jobs, strict=True):
                host.last_message = time.monotonic()
                host.send("start", job=asdict(job))
            self._loop.run()
            self._watchdog.close()
            self._cleanup()
        self._supervisor = None
        return supervisor.result()

    def _cleanup(self) -> None:
        """Ends what the ranks have left on every host, and takes the last of their output."""
        for host in self.hosts:
            host.send("cleanup")
        self._await("cleaned", seconds=CLEANUP_S)
        for host in self.hosts:
            host.answers.pop("cleaned", None)

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGWINCH:
            self.hosts[0].send("resize")
        elif self._supervisor is not None:
            self._supervisor.on_signal(number)

    # --- messages -----------------------------------------------------------------------------------

    def _begin_with(self, host: AgentConnection) -> None:
        host.watch = partial(self._watch, host)
        host.watch()

    def _watch(self, host: AgentConnection) -> None:
        if not host.gone and not self._paused:
            self._loop.watch(host.link.fileno(), lambda: self._receive(host), writable=bool(host.link.pending))

    def _receive(self, host: AgentConnection) -> None:
        host.last_message = time.monotonic()
        host.link.flush()
        for message in host.link.receive():
            self._on_message(host, message)
        if host.link.closed:
            self._lose(host, getattr(host.link, "fault", None) or "its agent has ended, or the connection to it")
        self._watch(host)

    def _on_message(self, host: AgentConnection, message: Message) -> None:
        body = message.body
        if message.kind == "output" and self._console is not None:
            self._console.feed(body["rank"], body["stream"], message.payload)
            self._show(self._console)
        elif message.kind == "signal" and self._supervisor is not None:
            self._supervisor.on_signal(body["number"], host.host)
        elif message.kind == "signal" and self._is_between:
            _interrupt(body["number"])
        elif message.kind == "start_failed":
            raise SamestepError(f"host {host.host} {body['reason']}")
        elif message.kind in {"heartbeat", "step_timing", "flight"}:
            if self._watchdog is not None:
                self._watchdog.on_message(host.host, message.kind, body)
        elif "rank" in body and self._supervisor is not None:
            self._supervisor.on_message(host, message.kind, body)
            if message.kind == "position" and self._console is not None:
                self._console.keep_stacks(body["rank"], message.payload)
        else:
            host.answers[message.kind] = body

    def _show(self, console: Console) -> None:
        """Shows the lines that wait for other ranks, or for a slow reader, when their time has come."""
        if self._merging is None and (seconds := console.show()) is not None:
            self._merging = self._loop.at(seconds, partial(self._show_now, console))
        self._pause_if_slow(console)

    def _show_now(self, console: Console) -> None:
        self._merging = None
        self._show(console)

    def _pause_if_slow(self, console: Console) -> None:
        """Lets the ranks wait for the reader of our output; failures, signals and ends are handled meanwhile."""
        if console.backlog > MOST_HELD and self._supervisor is not None and self._supervisor.ending:
            console.drop()
        pause = console.backlog > MOST_HELD // (4 if self._paused else 1)
        if pause == self._paused:
            return
        self._paused = pause
        for host in self.hosts:
            host.last_message = time.monotonic()
            if pause:
                self._loop.forget(host.link.fileno())
            else:
                self._watch(host)

    # --- lost hosts ---------------------------------------------------------------------------------

    def _check_silence(self) -> None:
        """Drops hosts that have been silent for long: a network may fail without an error."""
        self._loop.at(1.0, self._check_silence)
        running = self._supervisor is not None
        for host in self.hosts:
            if not running:
                host.send("alive")  # what its kernel acknowledges
            if not host.gone and not self._paused and host.silence(running=running) > HEARTBEAT_TIMEOUT_S:
                self._lose(host, f"no heartbeat for {HEARTBEAT_TIMEOUT_S:.0f} s")

    def hang_up(self, host: AgentConnection, reason: str) -> None:
        self._loop.forget(host.link.fileno())
        host.gone, host.fault = True, reason
        host.link.close()

    def _lose(self, host: AgentConnection, reason: str) -> None:
        self.hang_up(host, reason)
        if self._supervisor is None:
            raise SamestepError(f"host {host.host} is lost: {reason}")
        self._supervisor.on_lost_host(host, reason)

    # --- transports and the end -----------------------------------------------------------------------

    def read_streams(self, streams: Sequence[int], show: Callable[[bytes], None]) -> None:
        """Reads what the transports say from now on, so that they never wait for it, and shows it."""
        for descriptor in streams:
            self._loop.watch(descriptor, partial(self._read_stream, descriptor, show))

    def _read_stream(self, descriptor: int, show: Callable[[bytes], None]) -> None:
        data = os.read(descriptor, 1 << 16)
        show(data) if data else self._loop.forget(descriptor)

    def close(self) -> None:
        """Hangs up: every agent ends what is left, and itself. Those of this host are waited for."""
        for host in self.hosts:
            if not host.gone:
                host.link.drain(HANG_UP_S)
                self._loop.forget(host.link.fileno())
                host.link.close()
        self._loop.close()
        for host in (*self.hosts, *self._former):
            if host.process is not None:
                if not host.ranks:
                    os.kill(host.process, signal.SIGKILL)  # it has nothing to clear, and may import torch for seconds
                os.waitpid(host.process, 0)
        if any(host.gone and host.process is not None for host in (*self.hosts, *self._former)):
            kill_orphans()  # what that agent would have ended has come to us

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()
