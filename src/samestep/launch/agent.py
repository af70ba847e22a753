"""One small process per host: it holds the host's ranks, and does what the head says over one connection.

    head (samestep run)                agent                        team of ranks
      prepare {job}             ->       imports torch, once
                                <-       prepared {note}
      bind {address}            ->       opens the store's socket
                                <-       bound {port}
      start {job}               ->                                  N processes
                                <-       output, pulse, pace, flight, failed, waiting, cannot, preempted, ended
      order {what, ranks}       ->                                  stop, preempt, flight, ask, signal, kill, …
      standing {text}           ->                                  rank 0's display shows it
      clear                     ->                                  whatever they have left
                                <-       cleared {left}
    end of the connection       ->       kills all of it, and ends

On the head's own host it is a fork of the head: so the head may be killed in any way, and there is still somebody to
end the ranks, what they have started, and what has left their groups. On another host a transport starts it, and the
first line of its standard input says where the head is and with what word to come in: nothing secret is ever on a
command line.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import sys
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, NoReturn

from samestep.errors import RendezvousError, UsageError
from samestep.launch.address import listen
from samestep.launch.facts import Facts, look
from samestep.launch.fork import import_torch
from samestep.launch.frames import Link, Message
from samestep.launch.limits import raise_limit
from samestep.launch.loop import Loop
from samestep.launch.network import Doorbell, Target, interface_named, probe, route_to
from samestep.launch.process import adopt_orphans, die_with_parent, open_missing_streams, outlive_parent
from samestep.launch.pulse import Pulses
from samestep.launch.signals import PASSED_ON, Signals
from samestep.launch.team import Job, LocalRanks
from samestep.launch.variables import threads_per_rank
from samestep.launch.wire import SealedLink, connect
from samestep.rankenv import set_variables

__all__: list[str] = []

MOST_WAITING = 4 << 20  # bytes of output on their way to the head
UNANSWERED = 10.0  # seconds without any answer from the head's kernel after which it is gone
BEAT = 1.0  # seconds between signs of life
BURIAL = 5.0  # seconds between looks for what has ended and is nobody's
PROBE = 3.0  # seconds for another host to answer
COMING = 10.0  # seconds in which the head must be found


@dataclass(frozen=True, kw_only=True)
class Greeting:
    """What an agent on another host must know to come in; one JSON line.

    `addresses` and `port` are the head's; `name` is what it calls this host, `index` its place among the hosts and
    `ranks` how many it brings, where that is known.
    """

    addresses: tuple[str, ...]
    port: int
    token: str
    directory: str = "."
    variables: dict[str, str] = field(default_factory=dict)
    name: str | None = None
    index: int | None = None
    ranks: int | None = None


class Agent:
    """Serves one head until it hangs up."""

    def __init__(self, link: Link, about: Greeting | None = None) -> None:
        self._link = link
        self._about = about
        self._loop = Loop()
        self._team = LocalRanks(self._loop, self._tell)
        self._paused = False  # the ranks' output is not read
        self._listener: socket.socket | None = None
        self._doorbell: Doorbell | None = None
        self.exit_code: int | None = None  # of the run, if the head told it

    def serve(self) -> None:
        """Does what it is told until the connection ends, then ends everything.

        A signal that reaches this process is the head's to decide on: told to it from another host, where a scheduler
        may have sent it to this process alone; ignored on its own, where it gets the same signal itself.
        """
        adopt_orphans()
        raise_limit()
        self._watch()
        if self._about is not None:
            self._beat()
        self._bury()
        Pulses(self._loop, self._team.records, lambda kind, body: self._tell(kind, **body))
        with Signals(self._loop, PASSED_ON, self._signalled):
            try:
                self._loop.run()
            finally:
                self._team.end()

    def hang_up_with(self, lifeline: int) -> None:
        """Ends as if the head had hung up when the input `lifeline` ends: the transport is gone."""
        self._loop.watch(lifeline, partial(self._breathe, lifeline))

    def _breathe(self, lifeline: int) -> None:
        if not os.read(lifeline, 4096):
            self._loop.forget(lifeline)
            self._loop.stop()

    def _beat(self) -> None:
        if isinstance(self._link, SealedLink) and self._link.unanswered() > UNANSWERED:
            self._loop.stop()  # the network is gone, and the head with it
        self._tell("alive")
        self._loop.at(BEAT, self._beat)

    def _bury(self) -> None:
        self._team.bury()
        self._loop.at(BURIAL, self._bury)

    def _signalled(self, number: int) -> None:
        if self._about is not None:
            self._tell("signalled", number=number)

    def _watch(self) -> None:
        self._loop.watch(self._link.fileno(), self._hear, writable=self._link.wants_write())

    def _tell(self, kind: str, payload: bytes = b"", **body: Any) -> None:
        self._link.send({"kind": kind, **body}, payload)
        self._mind_the_head()
        self._watch()

    def _mind_the_head(self) -> None:
        """Lets the ranks wait for their pipes while the head does not keep up; orders are heard all the same."""
        pause = self._link.pending > MOST_WAITING // (4 if self._paused else 1)
        if pause != self._paused:
            self._paused = pause
            self._team.pause(pause=pause)

    def _hear(self) -> None:
        self._link.flush()
        self._mind_the_head()
        for message in self._link.receive():
            self._follow(message)
        if self._link.closed:
            self._loop.forget(self._link.fileno())
            self._loop.stop()
        else:
            self._watch()

    def _follow(self, message: Message) -> None:
        body = message.body
        match message.kind:
            case "prepare":
                self._tell("prepared", note=self._team.prepare(job_from(body["job"])))
            case "bind":
                self._bind(body["address"])
            case "start":
                self._start(job_from(body["job"]))
            case "order":
                self._team.order(body["what"], body["ranks"], body["number"])
            case "standing":
                self._team.show_standing(body["text"])
            case "resize":
                self._team.resize()
            case "look":
                self._tell("facts", facts=self._look(body).as_json())
            case "ring":
                self._doorbell = Doorbell(body["address"])
                self._loop.watch(self._doorbell.fileno(), self._doorbell.serve_ready)
                self._tell("ringing", port=self._doorbell.port, nonce=self._doorbell.nonce)
            case "probe":
                self._tell("probed", **self._probe(body))
            case "quiet":
                self._silence()
            case "over":
                self.exit_code = body["exit"]
            case "clear":
                self._tell("cleared", left=self._team.clear())

    def _bind(self, address: str) -> None:
        try:
            self._listener = listen(address)
        except OSError as error:  # EADDRINUSE: of all ports that the kernel gives, none is free
            fix = "; `sysctl net.ipv4.ip_local_port_range` says which ports there are, `ss -tan` who has them"
            reason = f"cannot listen at {address}, where the ranks meet: {error.strerror}"
            self._tell("unable", reason=reason + (fix if error.errno == errno.EADDRINUSE else ""))
        else:
            self._tell("bound", port=self._listener.getsockname()[1])

    def _start(self, job: Job) -> None:
        listener, self._listener = self._listener, None
        outlive_parent()  # until now there was nothing to clear away
        try:
            self._team.start(job, listener)
        except OSError as error:
            self._tell("unable", reason=f"cannot start {len(job.ranks)} ranks: {error}")

    def _probe(self, body: dict[str, Any]) -> dict[str, Any]:
        """Tries the other hosts' doorbells, and finds the interface that leads to them."""
        targets = {name: Target(**target) for name, target in body["targets"].items()}
        asked = body["interface"]
        try:
            chosen = interface_named(asked) if asked else None
        except UsageError as error:
            return {"fault": str(error)}
        reached = probe(targets, PROBE, self._doorbell)
        ways = [way for target in targets.values() if (way := route_to(target.address)) is not None]
        ways.sort(key=lambda way: way.is_loopback)  # part of a run on this host, part elsewhere
        name = chosen.name if chosen is not None else next((way.name for way in ways), None)
        return {"reached": reached, "interface": name}

    def _silence(self) -> None:
        """Takes the doorbell away."""
        if self._doorbell is not None:
            self._loop.forget(self._doorbell.fileno())
            self._doorbell.close()
            self._doorbell = None

    def _look(self, body: dict[str, Any]) -> Facts:
        known = {} if self._about is None else {"index": self._about.index, "ranks": self._about.ranks}
        return look(body["program"], is_module=body["is_module"], name=body["name"], **known)


def job_from(body: dict[str, Any]) -> Job:
    """Returns the job that came as JSON, its lists tuples again."""
    known = {field.name for field in fields(Job)}
    return Job(**{name: _tuples(value) for name, value in body.items() if name in known})


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def fork_agent(link: Link, ours: Link) -> int:
    """Starts an agent as a fork of this process and returns its process number; `ours` is the head's end."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()  # the keyboard's signals are the head's
        die_with_parent(parent)  # importing torch takes seconds in which it hears nothing
        ours.close()
        live(link)
    finally:
        os._exit(70)


def live(link: Link) -> NoReturn:
    """Serves the head at the other end of `link`, of which this process is a fork."""
    Agent(link).serve()
    os._exit(0)


def live_ahead(end: socket.socket, parent: int, ranks: int) -> NoReturn:
    """Serves the head at the other end as soon as torch is imported for so many ranks (samestep.launch.ahead)."""
    os.setsid()
    die_with_parent(parent)
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    import_torch(threads_per_rank(ranks))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    live(Link(end))


def come_in(greeting: Greeting, seconds: float, *, patient: bool = True) -> Agent:
    """Returns an agent that is connected to the head which `greeting` tells of; `patient` if that may come later.

    Raises:
        RendezvousError: the head cannot be reached, or is another run's.
    """
    about = {"name": greeting.name, "host": socket.gethostname(), "index": greeting.index, "pid": os.getpid()}
    link = connect(greeting.addresses, greeting.port, greeting.token, about, seconds=seconds, patient=patient)
    return Agent(link, greeting)


def main() -> int:
    """Serves the head that the first line of standard input tells of; what a transport starts on another host."""
    open_missing_streams()
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            return 0  # whoever started this is gone already
        line += byte
    greeting = Greeting(**{name: _tuples(value) for name, value in json.loads(line).items()})
    try:
        os.chdir(greeting.directory)
        set_variables(greeting.variables)
        agent = come_in(greeting, COMING, patient=False)  # it has started this
    except OSError as error:
        sys.stderr.write(f"samestep: error: cannot work in {greeting.directory} here: {error.strerror}\n")
        return 2
    except RendezvousError as error:
        sys.stderr.write(f"samestep: error: {error}\n")
        return 2
    agent.hang_up_with(0)
    agent.serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
