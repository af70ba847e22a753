"""The head of a run: it gives every host's agent its ranks, hears what they say, and shows it.

On one host there is one agent, a fork of this process (samestep.launch.agent says why). On several the others are
connected by the time a head is made; from then on there is no difference.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from types import TracebackType
from typing import Any, NoReturn, Self

from samestep.errors import SamestepError
from samestep.launch import ahead
from samestep.launch.agent import fork_agent
from samestep.launch.console import MOST_HELD, Console
from samestep.launch.frames import Link, Message, pair
from samestep.launch.hang import HANG_AFTER_S
from samestep.launch.limits import raise_limit
from samestep.launch.loop import Alarm, Loop
from samestep.launch.process import adopt_orphans, end_orphans
from samestep.launch.signals import PASSED_ON, Signals
from samestep.launch.supervise import Supervisor
from samestep.launch.team import Job
from samestep.launch.verdict import RunResult
from samestep.launch.vigil import Note, OnHang, Watchdog
from samestep.launch.wire import SealedLink

__all__: list[str] = []

HANGING_UP = 2.0  # seconds for the last words to leave
SILENCE = 10.0  # seconds without a sign of life after which another host is lost
CLEARING = 10.0  # seconds for a host to say that nothing is left there


class Host:
    """One host's ranks, as the head sees them: its agent at the other end of a link."""

    def __init__(self, host: str, link: Link, ranks: int, process: int | None = None) -> None:
        self.host = host
        self.process = process  # the agent's, where it is a child of this one
        self.address: str | None = None  # where it is, seen from here; None on this host
        self.local_address: str | None = None  # where this host is, seen from there
        self.link = link
        self.count = ranks
        self.ranks: tuple[int, ...] = ()
        self.answers: dict[str, dict[str, Any]] = {}
        self.heard = time.monotonic()  # when it gave a sign of life
        self.gone = False
        self.fault = ""  # why it is gone
        self.watch: Callable[[], None] = lambda: None  # called when the link may have something left to write

    def send(self, kind: str, **body: Any) -> None:
        """Sends one message; to a host that is gone, nothing."""
        if not self.gone:
            self.link.send({"kind": kind, **body})
            self.watch()

    def silence(self, *, running: bool) -> float:
        """Returns the seconds since it gave a sign of life; one that imports torch, and runs nothing, cannot speak."""
        if not isinstance(self.link, SealedLink):
            return 0.0  # on this host, where the kernel tells
        return time.monotonic() - self.heard if running else self.link.unanswered()

    def order(self, what: str, ranks: Sequence[int], number: int = 0) -> None:
        """Passes an order on to its ranks."""
        self.send("order", what=what, ranks=list(ranks), number=number)


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """What one attempt runs: a job for each host, where its output and its events go, and what becomes of a hang."""

    jobs: tuple[Job, ...]
    console: Console
    grace: float
    hang_after: float = HANG_AFTER_S
    on_hang: OnHang = "auto"
    machines: int = 1
    note: Note = lambda *_: None


class Interruption(Exception):  # noqa: N818  (not a mistake)
    """A signal came while no ranks ran; its number."""


def _interrupt(number: int) -> NoReturn:
    raise Interruption(number)


def name_of(link: SealedLink) -> str:
    """Returns what a host that has come in calls itself; its address where it does not say."""
    return str(link.peer_about.get("host") or link.address[0])


def from_afar(link: SealedLink) -> Host:
    """Returns the host of an agent that has come in."""
    host = Host(str(link.peer_about.get("name") or name_of(link)), link, 0)
    host.address, host.local_address = link.address[0], link.local_address
    return host


def open_here(name: str, ranks: int) -> Host:
    """Starts an agent on this host, as a fork of this process, which must be single-threaded."""
    if (early := ahead.take(ranks)) is not None:
        process, end = early
        return Host(name, Link(end), ranks, process)
    ours, theirs = pair()
    process = fork_agent(theirs, ours)
    theirs.close()
    return Host(name, ours, ranks, process)


class Controller:
    """Holds the agents of all hosts for as long as the run lasts; a context manager.

    Args:
        hosts: in the order of their ranks.
    """

    def __init__(self, hosts: Sequence[Host]) -> None:
        self.hosts = list(hosts)
        self._loop = Loop()
        self._left_behind: list[Host] = []
        self._supervisor: Supervisor | None = None
        self._vigil: Watchdog | None = None
        self._console: Console | None = None
        self._folding: Alarm | None = None
        self._paused = False  # the ranks' output is not read: whoever reads ours does not keep up
        self._is_between = False  # no ranks run, and a signal breaks off what is done meanwhile
        adopt_orphans()
        raise_limit()
        for host in self.hosts:
            self._begin_with(host)
        self._listen_for_life()

    def prepare(self, jobs: Sequence[Job]) -> list[str]:
        """Lets every host import what its ranks need; returns what a person should know."""
        for host, job in zip(self.hosts, jobs, strict=True):
            host.send("prepare", job=asdict(job))
        self._await("prepared")
        notes = [host.answers.pop("prepared", {}).get("note") for host in self.hosts]
        return list(dict.fromkeys(note for note in notes if note))

    def ask(self, kind: str, answer: str, body: Callable[[Host], dict[str, Any]]) -> list[dict[str, Any]]:
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

    def run(self, attempt: Attempt) -> RunResult:
        """Starts all ranks, and returns when none is left, nor anything that one has started."""
        start = 0
        for host, job in zip(self.hosts, attempt.jobs, strict=True):
            host.ranks = tuple(range(start, start + len(job.ranks)))
            start += len(job.ranks)
        self._console = attempt.console
        self._supervisor = Supervisor(self._loop, self.hosts, self._loop.stop, grace=attempt.grace)
        self._vigil = self._watch_over(attempt, self._supervisor)
        with Signals(self._loop, (*PASSED_ON, signal.SIGWINCH), self._signalled):
            for host, job in zip(self.hosts, attempt.jobs, strict=True):
                host.heard = time.monotonic()
                host.send("start", job=asdict(job))
            self._loop.run()
            self._vigil.close()
            self._clear()
        verdict, self._supervisor = self._supervisor.verdict(), None
        return verdict

    def _watch_over(self, attempt: Attempt, supervisor: Supervisor) -> Watchdog:
        return Watchdog(
            self._loop,
            lambda: [] if self._paused else supervisor.running(),  # who writes to a full pipe stands still
            supervisor.order,
            attempt.console.tell,
            supervisor.hung,
            attempt.note,
            lambda text: self.hosts[0].send("standing", text=text),
            least=attempt.hang_after,
            on_hang=attempt.on_hang,
            machines=attempt.machines,
            logs=attempt.console.logs,
        )

    def _listen_for_life(self) -> None:
        """Gives up hosts that have been silent for long: a network may fail without a word."""
        self._loop.at(1.0, self._listen_for_life)
        running = self._supervisor is not None
        for host in self.hosts:
            if not running:
                host.send("alive")  # what its kernel acknowledges
            if not host.gone and not self._paused and host.silence(running=running) > SILENCE:
                self._lose(host, f"no heartbeat for {SILENCE:.0f} s")

    def _clear(self) -> None:
        """Ends what the ranks have left on every host, and takes the last of their output."""
        for host in self.hosts:
            host.send("clear")
        self._await("cleared", seconds=CLEARING)
        for host in self.hosts:
            host.answers.pop("cleared", None)

    def _signalled(self, number: int) -> None:
        if number == signal.SIGWINCH:
            self.hosts[0].send("resize")
        elif self._supervisor is not None:
            self._supervisor.signalled(number)

    @contextmanager
    def between_attempts(self) -> Iterator[Loop]:
        """Yields the loop for what is to be done before, or between, attempts.

        Raises:
            Interruption: a signal has reached this process, or an agent, while the loop turned.
        """
        self._is_between = True
        try:
            with Signals(self._loop, PASSED_ON, _interrupt):
                yield self._loop
        finally:
            self._is_between = False

    def replace(self, lost: Host, new: Host) -> None:
        """Puts another host in the place of one that is gone."""
        self._left_behind.append(lost)
        new.ranks = lost.ranks
        self.hosts[self.hosts.index(lost)] = new
        self._begin_with(new)

    def reopen(self, lost: Host) -> None:
        """Starts another agent on this host; what the lost one would have ended has come to us."""
        end_orphans(own=[])
        lost.process = None  # reaped with them
        self.replace(lost, open_here(lost.host, lost.count))

    def settle(self) -> None:
        """Forgets what hosts have answered, or are about to, when questions were broken off."""
        for host in self.hosts:
            host.send("quiet")
        self._clear()
        for host in self.hosts:
            host.answers.clear()

    def _begin_with(self, host: Host) -> None:
        host.watch = partial(self._watch, host)
        host.watch()

    def _watch(self, host: Host) -> None:
        if not host.gone and not self._paused:
            self._loop.watch(host.link.fileno(), lambda: self._hear(host), writable=host.link.wants_write())

    def _hear(self, host: Host) -> None:
        host.heard = time.monotonic()
        host.link.flush()
        for message in host.link.receive():
            self._take(host, message)
        if host.link.closed:
            self._lose(host, getattr(host.link, "fault", None) or "its agent has ended, or the connection to it")
        self._watch(host)

    def _take(self, host: Host, message: Message) -> None:
        body = message.body
        if message.kind == "output" and self._console is not None:
            self._console.feed(body["rank"], body["stream"], message.payload)
            self._show_later(self._console)
        elif message.kind == "signalled" and self._supervisor is not None:
            self._supervisor.signalled(body["number"], host.host)
        elif message.kind == "signalled" and self._is_between:
            _interrupt(body["number"])
        elif message.kind == "unable":
            raise SamestepError(f"host {host.host} {body['reason']}")
        elif message.kind in {"pulse", "pace", "flight"}:
            if self._vigil is not None:
                self._vigil.hear(host.host, message.kind, body)
        elif "rank" in body and self._supervisor is not None:
            self._supervisor.hear(host, message.kind, body)
            if message.kind == "waiting":
                self._keep_stacks(body, message.payload)
        else:
            host.answers[message.kind] = body

    def _keep_stacks(self, body: dict[str, Any], stacks: bytes) -> None:
        if self._console is not None:
            self._console.keep_stacks(body["rank"], stacks)
        if self._vigil is not None and body["where"] is not None:
            self._vigil.stands(body["rank"], f"{body['where']}  {body['source'] or ''}".rstrip())

    def _show_later(self, console: Console) -> None:
        """Shows the lines that wait for other ranks, or for a slow reader, when their time has come."""
        if self._folding is None and (seconds := console.show()) is not None:
            self._folding = self._loop.at(seconds, partial(self._show_now, console))
        self._mind_the_reader(console)

    def _show_now(self, console: Console) -> None:
        self._folding = None
        self._show_later(console)

    def _mind_the_reader(self, console: Console) -> None:
        """Lets the ranks wait for whoever reads our output, but no failure, signal or end."""
        if console.backlog > MOST_HELD and self._supervisor is not None and self._supervisor.ending:
            console.drop()
        pause = console.backlog > MOST_HELD // (4 if self._paused else 1)
        if pause == self._paused:
            return
        self._paused = pause
        for host in self.hosts:
            host.heard = time.monotonic()
            if pause:
                self._loop.forget(host.link.fileno())
            else:
                self._watch(host)

    def let_go(self, host: Host, reason: str) -> None:
        """Hangs up on one host; its agent ends what is left there."""
        self._loop.forget(host.link.fileno())
        host.gone, host.fault = True, reason
        host.link.close()

    def _lose(self, host: Host, reason: str) -> None:
        self.let_go(host, reason)
        if self._supervisor is None:
            raise SamestepError(f"host {host.host} is lost: {reason}")
        self._supervisor.lost(host, reason)

    def _await(self, kind: str, hosts: Sequence[Host] | None = None, seconds: float | None = None) -> None:
        """Waits until all hosts that are not gone have answered so."""
        until = None if seconds is None else time.monotonic() + seconds
        while any(kind not in host.answers and not host.gone for host in hosts or self.hosts):
            self._loop.turn(None if until is None else max(0.0, until - time.monotonic()))
            if until is not None and time.monotonic() >= until:
                return

    def attend(self, streams: Sequence[int], show: Callable[[bytes], None]) -> None:
        """Reads what the transports say from now on, so that they never wait for it, and shows it."""
        for descriptor in streams:
            self._loop.watch(descriptor, partial(self._pass, descriptor, show))

    def _pass(self, descriptor: int, show: Callable[[bytes], None]) -> None:
        data = os.read(descriptor, 1 << 16)
        show(data) if data else self._loop.forget(descriptor)

    def neglect(self, streams: Sequence[int]) -> None:
        """Reads these no more. Call it before they are closed."""
        for descriptor in streams:
            self._loop.forget(descriptor)

    def tell_exit(self, code: int) -> None:
        """Lets agents that are commands of their own end as the run has ended."""
        for host in self.hosts:
            host.send("over", exit=code)

    def forget_lost(self) -> None:
        """Goes on without the hosts that are gone."""
        self._left_behind += [host for host in self.hosts if host.gone]
        self.hosts = [host for host in self.hosts if not host.gone]

    def close(self) -> None:
        """Hangs up: every agent ends what is left, and itself. Those of this host are waited for."""
        for host in self.hosts:
            if not host.gone:
                host.link.drain(HANGING_UP)
                self._loop.forget(host.link.fileno())
                host.link.close()
        self._loop.close()
        for host in (*self.hosts, *self._left_behind):
            if host.process is not None:
                if not host.ranks:
                    os.kill(host.process, signal.SIGKILL)  # it has nothing to clear, and may import torch for seconds
                os.waitpid(host.process, 0)
        if any(host.gone and host.process is not None for host in (*self.hosts, *self._left_behind)):
            end_orphans(own=[])  # what that agent would have ended has come to us

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
