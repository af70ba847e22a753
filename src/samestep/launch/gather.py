"""Brings the agents of several hosts together before any rank starts.

    --hosts a,b --via ssh        the transport starts an agent on each; it connects back
    --nnodes 2 --node-rank 1     started by hand on each host; number 0 waits where --rendezvous says
    srun, mpiexec                one task each; task 0 waits, and tells where in a file that all can read

Whoever is missing is named, with the reason that ssh or the host gave, and not after torchrun's five minutes; who comes
and does not belong here, with another token, number or command, is told so at once, and so is who waits.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

from samestep.errors import RendezvousError, UsageError
from samestep.launch.agent import Greeting
from samestep.launch.cluster import ordered
from samestep.launch.frames import Link
from samestep.launch.head import Controller, Host, from_afar, name_of, open_here
from samestep.launch.loop import Loop
from samestep.launch.meeting import publish
from samestep.launch.network import addresses
from samestep.launch.process import wait_all
from samestep.launch.sibling import NodeSpec
from samestep.launch.transport import Start, Started, agent_command, explain, start
from samestep.launch.transport import plan as plan_transport
from samestep.launch.wire import Listener, SealedLink, new_token

__all__: list[str] = []

LEAVING = 2.0  # seconds for a transport to end when its hosts have
CONNECT = 15.0  # seconds for agents that a transport starts
SOON = 3.0  # seconds after which a person should know what is waited for
MOST_NAMES = 8  # of those that are waited for
TOGETHER = 0.5  # seconds in which others may fail as the first one did

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class TransportSpec:
    """Hosts that are to be called over a transport; `variables` go along, for sshd takes none over."""

    hosts: tuple[str, ...]
    via: str = "ssh"
    ssh_args: str = ""
    python: str | None = None
    variables: dict[str, str] = field(default_factory=dict)

    def starts(self) -> list[Start]:
        """Returns the exact commands."""
        return plan_transport(self.via, self.hosts, agent_command(self.python), self.ssh_args)

    def greeting(self, port: int, token: str, index: int | None = None) -> str:
        """Returns the line that tells agents where to come in, and with what word."""
        here = tuple(interface.address for interface in addresses())
        known = Greeting(addresses=here, port=port, token=token, directory=str(Path.cwd()), variables=self.variables)
        return json.dumps(asdict(replace(known, index=index)))


def stream_descriptors(one: Started) -> list[int]:
    """Returns the descriptors by which a transport speaks."""
    return [stream.fileno() for stream in (one.process.stdout, one.process.stderr) if stream is not None]


@dataclass
class _Voice:
    """What a transport has said so far for one host."""

    text: list[str] = field(default_factory=list)
    code: int | None = None


class Hearing:
    """Hears what a transport says for as long as its agents are on their way, and tells when one will not come.

    Args:
        loop: what waits.
        one: the transport.
        failed: called with one line that says why, and what fixes it.
        python: the interpreter that is to run there, if that was said.
    """

    def __init__(self, loop: Loop, one: Started, failed: Callable[[str], None], python: str | None = None) -> None:
        self._loop = loop
        self._one = one
        self._tell = failed
        self._python = python
        self._voices: dict[str, _Voice] = {}
        self._told: set[str] = set()
        self._handle = os.pidfd_open(one.process.pid)
        for descriptor in stream_descriptors(one):
            os.set_blocking(descriptor, False)
            loop.watch(descriptor, partial(self._listen, descriptor))
        loop.watch(self._handle, self._ended)

    def leave(self) -> None:
        """Hears no more; the transport goes on, and its pipes stay open."""
        for descriptor in (*stream_descriptors(self._one), self._handle):
            self._loop.forget(descriptor)
        os.close(self._handle)

    def _listen(self, descriptor: int) -> bool:
        try:
            data = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return False
        for line in data.splitlines():
            said = self._one.hear(line)
            voice = self._voices.setdefault(said.host or "", _Voice())
            if said.exit_code is not None:
                voice.code = said.exit_code
                self._failed(said.host)
            else:
                voice.text.append(said.text)
        if not data:
            self._loop.forget(descriptor)
        return bool(data)

    def _ended(self) -> None:
        self._loop.forget(self._handle)
        for descriptor in stream_descriptors(self._one):
            while self._listen(descriptor):
                pass
        host = self._one.start.hosts[0]
        self._voices.setdefault(host, _Voice()).code = self._one.process.wait()
        if not self._told:
            self._failed(host)

    def _failed(self, host: str | None) -> None:
        name = host or self._one.start.hosts[0]
        if name in self._told:
            return
        self._told.add(name)
        voice = self._voices.get(name) or self._voices.get("") or _Voice()
        self._tell(explain(name, self._one.start.via, voice.code, "\n".join(voice.text), self._python))


class Gathering:
    """Agents on their way to this head.

    Args:
        expected: what to call those that are still missing.
        listener: where they come in.
        say: tells a person one line.
        where: how that goes on which says who is waited for.
        place: this process's own, where somebody else starts the agents; None where a transport does.
    """

    def __init__(
        self, expected: Sequence[str], listener: Listener, say: Say, where: str = "", place: NodeSpec | None = None
    ) -> None:
        self._expected = list(expected)
        self._listener = listener
        self._say = say
        self._where = where
        self._place = place
        self._loop = Loop()
        self._came: list[SealedLink] = []
        self._said: set[str] = set()
        self._fault: str | None = None
        self._also: list[str] = []  # what failed just after it

    def collect(self, seconds: float, started: Sequence[Started] = (), python: str | None = None) -> list[SealedLink]:
        """Returns one link for each expected agent, in the order of their coming.

        Raises:
            UsageError: a transport could not start one; says why, and what fixes it.
            RendezvousError: some did not come in time; says who.
        """
        self._loop.watch(self._listener.fileno(), self._accept)
        heard = [Hearing(self._loop, one, self._failed, python) for one in started]
        self._seconds = seconds
        alarms = [self._loop.at(seconds, self._too_late), self._loop.at(SOON, self._say_for_whom)]
        try:
            self._loop.run()
        except BaseException:
            self._refuse_all("error: node 0 has given up waiting")
            raise
        finally:
            for alarm in alarms:
                alarm.cancel()
            for hearing in heard:
                hearing.leave()
            self._loop.close()
        if self._fault is not None:
            self._refuse_all(f"error: {self._fault}")
            more = ["…"] if len(self._also) > MOST_NAMES else []
            raise (UsageError if started else RendezvousError)(
                "; ".join([self._fault, *self._also[:MOST_NAMES], *more])
            )
        return self._came

    def _accept(self) -> None:
        while (link := self._listener.accept()) is not None:
            self._judge(link)
        for refused in self._listener.refused:
            address, _, reason = refused.partition(": ")
            self._tell(f"note: {address} was rejected: {reason}")
        self._listener.refused.clear()
        if len(self._came) == len(self._expected):
            self._loop.stop()

    def _judge(self, link: SealedLink) -> None:
        """Takes in who belongs here; anybody may come again who has gone meanwhile."""
        for other in list(self._came):
            other.receive()  # signs of life
            if other.closed:
                other.close()
                self._came.remove(other)
        reason = None if self._place is None else self._place.objection(link.peer_about) or self._twice(link)
        if reason is None:
            self._came.append(link)
            return
        refuse([link], f"error: {reason}")
        if self._place is not None and self._place.launcher is not None:
            self._failed(reason)  # nobody will start another
        else:
            self._tell(f"note: {name_of(link)} ({link.address[0]}) was rejected: {reason}")

    def _twice(self, link: SealedLink) -> str | None:
        assert self._place is not None
        number = link.peer_about["index"]
        for other in self._came:
            if other.peer_about["index"] == number:
                first = f"{name_of(other)} ({other.address[0]}) is it"
                return (
                    f"{self._place.word} {number} is there twice, and {first}: give each host a --node-rank of its own"
                )
        return None

    def _refuse_all(self, reason: str) -> None:
        if self._place is not None:
            refuse(self._came, reason)
        for link in self._came:
            link.close()

    def _failed(self, reason: str) -> None:
        if self._fault is not None:
            self._also.append(reason)
            return
        self._fault = reason
        self._loop.at(TOGETHER, self._loop.stop)

    def _called(self, link: SealedLink) -> str:
        """Returns which of the expected ones has come in."""
        index, own = link.peer_about.get("index"), link.peer_about.get("name") or name_of(link)
        return next((name for name in self._expected if name.endswith(f" {index}")), str(own))

    def _missing(self) -> str:
        known = {self._called(link) for link in self._came}
        names = [name for name in self._expected if name not in known] or self._expected
        return ", ".join(names if len(names) <= MOST_NAMES else [*names[:MOST_NAMES], "…"])

    def _say_for_whom(self) -> None:
        self._say(f"waiting for up to {self._seconds:g} s for {self._missing()}{self._where}")

    def _tell(self, text: str) -> None:
        """Says a thing once: who was turned away may try again, and again."""
        if text not in self._said:
            self._said.add(text)
            self._say(text)

    def _too_late(self) -> None:
        missing, of = len(self._expected) - len(self._came), len(self._expected)
        count = f" ({missing} of the {of} that were waited for)" if of > 1 else ""
        self._fault = (
            f"waited {self._seconds:.0f} s, and {self._missing()} never came{count}: start samestep there too, or see "
            "whether this host can be reached from there"
        )
        self._loop.stop()


def refuse(links: Sequence[Link], said: str, code: int = UsageError.exit_code) -> None:
    """Tells agents that are commands of their own how the run has ended for them, and lets them go first.

    Hung up on at once, they might lose what was said: what they send then is answered by a reset.
    """
    for link in links:
        link.send({"kind": "over", "exit": code, "said": said})
    until = time.monotonic() + LEAVING
    for link in links:
        while not link.closed and (left := until - time.monotonic()) > 0:
            link.wait(left, reads=True)
            link.flush()
            link.receive()


def notify_end(head: Controller, said: str, code: int) -> None:
    """Tells agents that somebody else has started how their run has ended."""
    refuse([host.link for host in head.hosts if host.address is not None and not host.gone], said, code)


def invite(place: NodeSpec, port: int) -> None:
    """Says where this process waits, if the others do not know."""
    if place.file is not None:
        here = [interface.address for interface in addresses()]
        publish(place.file, {"addresses": here, "port": port, "token": place.token})


def start_by_transport(call: TransportSpec, say: Say) -> tuple[list[Host], list[Started]]:
    """Starts an agent on every host and returns them in their order, with what keeps them alive.

    Raises:
        UsageError: one could not be started; says why, and what fixes it.
    """
    token = new_token()
    with Listener(token) as listener:
        started = start(call.starts(), call.greeting(listener.port, token))
        try:
            where = f" to answer over {call.via} and to connect to this host"
            links = Gathering(call.hosts, listener, say, where).collect(CONNECT, started, call.python)
        except BaseException:
            stop_transports(started)
            raise
    aliases = {host: names_of(host, call.ssh_args) for host in call.hosts}
    return ordered([from_afar(link) for link in links], call.hosts, aliases), started


def stop_transports(started: Sequence[Started]) -> None:
    """Ends transports, and with them what they have started."""
    for one in started:
        one.release()
    wait_all([one.process for one in started], LEAVING)
    for one in started:
        one.end()


def wait_for_agents(place: NodeSpec, ranks: int, say: Say) -> list[Host]:
    """Returns the agents that were started beside this one, in the order of their numbers; this process is number 0."""
    own = open_here(socket.gethostname(), ranks)
    try:
        with _listener(place) as listener:
            invite(place, listener.port)
            names = [f"{place.word} {index}" for index in range(1, place.count)]
            where = f" to come in at {place.where}" if place.launcher is None else ""
            links = Gathering(names, listener, say, where, place).collect(place.patience)
    except BaseException:
        own.link.close()
        raise
    finally:
        if place.file is not None:
            place.file.unlink(missing_ok=True)
    return [own, *(from_afar(link) for link in sorted(links, key=lambda link: int(link.peer_about["index"])))]


def _listener(place: NodeSpec) -> Listener:
    try:
        return Listener(place.token, place.bind, place.port)
    except RendezvousError as error:
        hint = "; if it is node 0 of this run that has it, this host is another node: give it another --node-rank"
        raise RendezvousError(f"{error}{hint if place.port else ''}") from error


def names_of(host: str, ssh_args: str = "") -> set[str]:
    """Returns what else ssh calls a host: the name or address that its configuration has for it."""
    done = subprocess.run(
        ["ssh", *shlex.split(ssh_args), "-G", host], capture_output=True, text=True, errors="replace", check=False
    )
    found = [line.split(maxsplit=1)[1] for line in done.stdout.splitlines() if line.startswith("hostname ")]
    machine = host.rpartition("@")[2]
    return {machine, machine.partition(".")[0], *found}
