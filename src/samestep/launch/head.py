"""The head of a run: it gives every host's agent its ranks, hears what they say, and shows it.

On one host there is one agent, a fork of this process (samestep.launch.agent says why). On several the others are
connected by the time a head is made; from then on there is no difference.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from types import FrameType, TracebackType
from typing import Any, Self

from samestep.errors import SamestepError
from samestep.launch.agent import fork_agent
from samestep.launch.console import Console
from samestep.launch.frames import Link, Message, pair
from samestep.launch.loop import Loop
from samestep.launch.process import adopt_orphans, end_orphans
from samestep.launch.supervise import Supervisor
from samestep.launch.team import Job
from samestep.launch.verdict import Verdict

__all__: list[str] = []

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
CLEARING = 10.0  # seconds for a host to say that nothing is left there


class Host:
    """One host's ranks, as the head sees them: its agent at the other end of a link."""

    def __init__(self, host: str, link: Link, ranks: int, process: int | None = None) -> None:
        self.host = host
        self.process = process  # the agent's, where it is a child of this one
        self.link = link
        self.count = ranks
        self.ranks: tuple[int, ...] = ()
        self.answers: dict[str, dict[str, Any]] = {}
        self.gone = False
        self.watch: Callable[[], None] = lambda: None  # called when the link may have something left to write

    def send(self, kind: str, **body: Any) -> None:
        """Sends one message; to a host that is gone, nothing."""
        if not self.gone:
            self.link.send({"kind": kind, **body})
            self.watch()

    def order(self, what: str, ranks: Sequence[int], number: int = 0) -> None:
        """Passes an order on to its ranks."""
        self.send("order", what=what, ranks=list(ranks), number=number)


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """What one attempt runs: a job for each host, and where its ranks' output goes."""

    jobs: tuple[Job, ...]
    console: Console
    grace: float


def open_here(name: str, ranks: int) -> Host:
    """Starts an agent on this host, as a fork of this process, which must be single-threaded."""
    ours, theirs = pair()
    process = fork_agent(theirs, ours)
    theirs.close()
    return Host(name, ours, ranks, process)


class Head:
    """Holds the agents of all hosts for as long as the run lasts; a context manager.

    Args:
        hosts: in the order of their ranks.
    """

    def __init__(self, hosts: Sequence[Host]) -> None:
        self.hosts = list(hosts)
        self._loop = Loop()
        self._supervisor: Supervisor | None = None
        self._console: Console | None = None
        adopt_orphans()
        for host in self.hosts:
            host.watch = partial(self._watch, host)
            host.watch()

    def prepare(self, jobs: Sequence[Job]) -> list[str]:
        """Lets every host import what its ranks need; returns what a person should know."""
        for host, job in zip(self.hosts, jobs, strict=True):
            host.send("prepare", job=asdict(job))
        self._await("prepared")
        notes = [host.answers.pop("prepared", {}).get("note") for host in self.hosts]
        return list(dict.fromkeys(note for note in notes if note))

    def bind(self, address: str) -> int:
        """Returns the port of `address` that the first host now holds for the store."""
        first = self.hosts[0]
        first.send("bind", address=address)
        self._await("bound", [first])
        port: int = first.answers.pop("bound")["port"]
        return port

    def run(self, attempt: Attempt) -> Verdict:
        """Starts all ranks, and returns when none is left, nor anything that one has started."""
        start = 0
        for host, job in zip(self.hosts, attempt.jobs, strict=True):
            host.ranks = tuple(range(start, start + len(job.ranks)))
            start += len(job.ranks)
        self._console = attempt.console
        self._supervisor = Supervisor(self._loop, self.hosts, self._loop.stop, grace=attempt.grace)
        with _Signals(self._loop, self._signalled):
            for host, job in zip(self.hosts, attempt.jobs, strict=True):
                host.send("start", job=asdict(job))
            self._loop.run()
            self._clear()
        verdict, self._supervisor = self._supervisor.verdict(), None
        return verdict

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

    def _watch(self, host: Host) -> None:
        if not host.gone:
            self._loop.watch(host.link.fileno(), lambda: self._hear(host), writable=host.link.wants_write())

    def _hear(self, host: Host) -> None:
        host.link.flush()
        for message in host.link.receive():
            self._take(host, message)
        if host.link.closed:
            self._lose(host, "its agent has ended, or the connection to it")
        self._watch(host)

    def _take(self, host: Host, message: Message) -> None:
        body = message.body
        if message.kind == "output" and self._console is not None:
            self._console.feed(body["rank"], body["stream"], message.payload)
        elif message.kind == "signalled" and self._supervisor is not None:
            self._supervisor.signalled(body["number"], host.host)
        elif message.kind == "unable":
            raise SamestepError(f"host {host.host} {body['reason']}")
        elif "rank" in body and self._supervisor is not None:
            self._supervisor.hear(host, message.kind, body)
        else:
            host.answers[message.kind] = body

    def _lose(self, host: Host, reason: str) -> None:
        self._loop.forget(host.link.fileno())
        host.gone = True
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

    def close(self) -> None:
        """Hangs up: every agent ends what is left, and itself. Those of this host are waited for."""
        for host in self.hosts:
            self._loop.forget(host.link.fileno())
            host.link.close()
        self._loop.close()
        for host in self.hosts:
            if host.process is not None:
                os.waitpid(host.process, 0)
        if any(host.gone and host.process is not None for host in self.hosts):
            end_orphans(own=[])  # what that agent would have ended has come to us

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Signals:
    """Brings the signals that reach the launcher into its loop; a context manager."""

    def __init__(self, loop: Loop, then: Callable[[int], None]) -> None:
        self._loop = loop
        self._then = then
        self._reader, self._writer = socket.socketpair()
        for end in (self._reader, self._writer):
            end.setblocking(False)
        self._numbers = (*SIGNALS, signal.SIGWINCH)

    def __enter__(self) -> Self:
        self._previous_wakeup = signal.set_wakeup_fd(self._writer.fileno())
        self._previous = {number: signal.signal(number, _nothing) for number in self._numbers}
        self._loop.watch(self._reader.fileno(), self._read)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.set_wakeup_fd(self._previous_wakeup)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._loop.forget(self._reader.fileno())
        self._reader.close()
        self._writer.close()

    def _read(self) -> None:
        for number in self._reader.recv(64):
            if number in self._numbers:
                self._then(number)


def _nothing(number: int, frame: FrameType | None) -> None:
    """A handler must exist for the wakeup descriptor to be written."""
