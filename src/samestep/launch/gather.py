"""Brings the agents of several hosts together before any rank starts.

    --hosts a,b --via ssh        the transport starts an agent on each; it connects back
    --nnodes 2 --node-rank 1     started by hand on each host; number 0 waits where --rendezvous says
    srun, mpiexec                one task each; task 0 waits, and tells where in a file that all can read

Whoever is missing is named, with the reason that ssh or the host gave, and not after torchrun's five minutes.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

from samestep.errors import RendezvousError, UsageError
from samestep.launch.agent import Agent, Greeting, come_in
from samestep.launch.cluster import ordered
from samestep.launch.head import Host, from_afar, open_here
from samestep.launch.loop import Loop
from samestep.launch.meeting import await_published, place_for, publish
from samestep.launch.network import addresses
from samestep.launch.process import wait_all
from samestep.launch.transport import Start, Started, agent_command, explain, start
from samestep.launch.transport import plan as plan_transport
from samestep.launch.wire import Listener, SealedLink, new_token
from samestep.rankenv import RankVariables

__all__: list[str] = []

LEAVING = 2.0  # seconds for a transport to end when its hosts have
CONNECT = 15.0  # seconds for agents that a transport starts
PATIENCE = 300.0  # seconds for agents that somebody else starts; a queue may start hosts one by one


@dataclass(frozen=True, kw_only=True)
class Call:
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


@dataclass(frozen=True, kw_only=True)
class Sibling:
    """One of `count` processes that somebody else has started; number 0 leads.

    They meet at `address` and `port`, or through a file.
    """

    index: int
    count: int
    address: str | None = None
    port: int = 0
    token: str = ""
    file: Path | None = None
    patience: float = PATIENCE
    launcher: str | None = None

    @property
    def word(self) -> str:
        """What the processes of this run call each other."""
        return "task" if self.file is not None else "node"


def sibling_of(told: RankVariables, patience: float = PATIENCE) -> Sibling:
    """Returns this process's place among the tasks of an srun or mpiexec."""
    file, token = place_for(told), new_token()
    return Sibling(index=told.rank, count=told.size, file=file, token=token, patience=patience, launcher=told.source)


def streams_of(one: Started) -> list[int]:
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
        failed: called with one line that says why, and what mends it.
        python: the interpreter that is to run there, if that was said.
    """

    def __init__(self, loop: Loop, one: Started, failed: Callable[[str], None], python: str | None = None) -> None:
        self._loop = loop
        self._one = one
        self._tell = failed
        self._python = python
        self._voices: dict[str, _Voice] = {}
        self._told = False
        self._handle = os.pidfd_open(one.process.pid)
        for descriptor in streams_of(one):
            os.set_blocking(descriptor, False)
            loop.watch(descriptor, partial(self._listen, descriptor))
        loop.watch(self._handle, self._ended)

    def leave(self) -> None:
        """Hears no more; the transport goes on, and its pipes stay open."""
        for descriptor in (*streams_of(self._one), self._handle):
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
        for descriptor in streams_of(self._one):
            while self._listen(descriptor):
                pass
        host = self._one.start.hosts[0]
        self._voices.setdefault(host, _Voice()).code = self._one.process.wait()
        self._failed(host)

    def _failed(self, host: str | None) -> None:
        if self._told:
            return
        self._told = True
        name = host or self._one.start.hosts[0]
        voice = self._voices.get(name) or self._voices.get("") or _Voice()
        self._tell(explain(name, self._one.start.via, voice.code, "\n".join(voice.text), self._python))


class Gathering:
    """Agents on their way to this head.

    Args:
        expected: what to call those that are still missing.
        listener: where they come in.
    """

    def __init__(self, expected: Sequence[str], listener: Listener) -> None:
        self._expected = list(expected)
        self._listener = listener
        self._loop = Loop()
        self._came: list[SealedLink] = []
        self._fault: str | None = None

    def collect(self, seconds: float, started: Sequence[Started] = (), python: str | None = None) -> list[SealedLink]:
        """Returns one link for each expected agent, in the order of their coming.

        Raises:
            UsageError: a transport could not start one; says why, and what mends it.
            RendezvousError: some did not come in time; says who.
        """
        self._loop.watch(self._listener.fileno(), self._accept)
        heard = [Hearing(self._loop, one, self._failed, python) for one in started]
        alarm = self._loop.at(seconds, self._too_late)
        self._seconds = seconds
        try:
            self._loop.run()
        finally:
            alarm.cancel()
            for hearing in heard:
                hearing.leave()
            self._loop.close()
        if self._fault is not None:
            for link in self._came:
                link.close()
            raise (UsageError if started else RendezvousError)(self._fault)
        return self._came

    def _accept(self) -> None:
        while (link := self._listener.accept()) is not None:
            self._came.append(link)
        if len(self._came) == len(self._expected):
            self._loop.stop()

    def _failed(self, reason: str) -> None:
        self._fault = self._fault or reason
        self._loop.stop()

    def _called(self, link: SealedLink) -> str:
        """Returns which of the expected ones has come in."""
        index, own = link.peer_about.get("index"), link.peer_about.get("name") or link.peer_about["host"]
        return next((name for name in self._expected if name.endswith(f" {index}")), str(own))

    def _too_late(self) -> None:
        missing = len(self._expected) - len(self._came)
        known = {self._called(link) for link in self._came}
        names = [name for name in self._expected if name not in known] or self._expected
        self._fault = (
            f"waited {self._seconds:.0f} s, and {missing} of {len(self._expected)} hosts never came "
            f"({', '.join(names)}): start samestep there too, or check that they can reach this host"
        )
        self._loop.stop()


def invite(place: Sibling, port: int) -> None:
    """Says where this process waits, if the others do not know."""
    if place.file is not None:
        here = [interface.address for interface in addresses()]
        publish(place.file, {"addresses": here, "port": port, "token": place.token})


def by_transport(call: Call) -> tuple[list[Host], list[Started]]:
    """Starts an agent on every host and returns them in their order, with what keeps them alive.

    Raises:
        UsageError: one could not be started; says why, and what mends it.
    """
    token = new_token()
    with Listener(token) as listener:
        started = start(call.starts(), call.greeting(listener.port, token))
        try:
            links = Gathering(call.hosts, listener).collect(CONNECT, started, call.python)
        except BaseException:
            dismiss(started)
            raise
    aliases = {host: names_of(host, call.ssh_args) for host in call.hosts}
    return ordered([from_afar(link) for link in links], call.hosts, aliases), started


def dismiss(started: Sequence[Started]) -> None:
    """Ends transports, and with them what they have started."""
    for one in started:
        one.release()
    wait_all([one.process for one in started], LEAVING)
    for one in started:
        one.end()


def by_invitation(place: Sibling, ranks: int) -> list[Host]:
    """Returns the agents that were started beside this one, in the order of their numbers; this process is number 0."""
    own = open_here(socket.gethostname(), ranks)
    try:
        with Listener(place.token, "0.0.0.0", place.port) as listener:  # noqa: S104  (the others must reach it)
            invite(place, listener.port)
            names = [f"{place.word} {index}" for index in range(1, place.count)]
            links = Gathering(names, listener).collect(place.patience)
    except BaseException:
        own.link.close()
        raise
    finally:
        if place.file is not None:
            place.file.unlink(missing_ok=True)
    numbers = [link.peer_about["index"] for link in links]
    twice = {number for number in numbers if numbers.count(number) > 1 or not 0 < number < place.count}
    if twice:
        wrong = f"{place.word} {min(twice)} is there twice, or is none of 0 to {place.count - 1}"
        raise UsageError(f"{wrong}: give each host a number of its own")
    return [own, *(from_afar(link) for _, link in sorted(zip(numbers, links, strict=True), key=lambda pair: pair[0]))]


def follow(place: Sibling, ranks: int) -> Agent:
    """Returns the agent that this process is, where it is not the one that leads; it is connected already."""
    if place.file is not None:
        found = await_published(place.file, place.patience)
        known = Greeting(addresses=tuple(found["addresses"]), port=found["port"], token=found["token"])
    else:
        assert place.address is not None
        known = Greeting(addresses=(place.address,), port=place.port, token=place.token)
    return come_in(replace(known, index=place.index, ranks=ranks), place.patience)


def names_of(host: str, ssh_args: str = "") -> set[str]:
    """Returns what else ssh calls a host: the name or address that its configuration has for it."""
    done = subprocess.run(["ssh", *shlex.split(ssh_args), "-G", host], capture_output=True, text=True, check=False)
    found = [line.split(maxsplit=1)[1] for line in done.stdout.splitlines() if line.startswith("hostname ")]
    machine = host.rpartition("@")[2]
    return {machine, machine.partition(".")[0], *found}
