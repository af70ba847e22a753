"""Waits until the agents of all hosts are connected: before the first attempt, and in the place of lost ones.

Missing hosts are named, with the reason that ssh or the host gave. An agent that does not belong to the run gets the
reason at once. Hosts that are left when one is lost keep their agents, with all that these have imported.
"""

from __future__ import annotations

import functools
import shlex
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from samestep.errors import RendezvousError, SamestepError, UsageError
from samestep.launch.controller import AgentConnection, Controller, connection_of, host_name, open_here
from samestep.launch.event_loop import Loop
from samestep.launch.hosts.preflight import HostRanks, ordered
from samestep.launch.hosts.secure_link import AuthenticatedLink, Listener, new_token
from samestep.launch.hosts.sources import (
    CONNECT_S,
    LEAVE_S,
    JoinSource,
    NodeSpec,
    TransportMonitor,
    TransportSource,
    TransportSpec,
    reject,
)
from samestep.launch.hosts.transport import Started, start
from samestep.launch.process import wait_all

SAY_AFTER_S = 3.0  # a person should know what is waited for
MOST_NAMES = 8  # of those that are waited for
TOGETHER_S = 0.5  # in which others may fail as the first one did

Say = Callable[[str], None]


# --- the first attempt ----------------------------------------------------------------------------


@dataclass
class AgentJoin:
    """Agents on their way to this controller.

    `expected` are the names of the agents, `where` ends the sentence that names the missing ones, `node` is this
    process's own where others start the agents, None where a transport does.
    """

    expected: Sequence[str]
    listener: Listener
    say: Say
    where: str = ""
    node: NodeSpec | None = None
    loop: Loop = field(default_factory=Loop)

    def __post_init__(self) -> None:
        self._say = functools.cache(self.say)  # once: a rejected agent may try again and again
        self._links: list[AuthenticatedLink] = []
        self._faults: list[str] = []  # the first one, and what failed just after it

    def collect(
        self, seconds: float, started: Sequence[Started] = (), python: str | None = None
    ) -> list[AuthenticatedLink]:
        """Returns one link for each expected agent, in the order of their coming.

        Raises:
            UsageError: a transport could not start one; says why, and what fixes it.
            RendezvousError: some did not come in time; says who.
        """
        self.loop.watch(self.listener.fileno(), self._accept)
        monitors = [TransportMonitor(self.loop, one, self._failed, python) for one in started]
        self._seconds = seconds
        self.loop.at(seconds, self._too_late)
        self.loop.at(
            SAY_AFTER_S, lambda: self._say(f"waiting for up to {seconds:g} s for {self._missing()}{self.where}")
        )
        try:
            self.loop.run()
        except BaseException:
            self._reject_all("error: node 0 has given up waiting")
            raise
        finally:
            for monitor in monitors:
                monitor.close()
            self.loop.close()
        if self._faults:
            self._reject_all(f"error: {self._faults[0]}")
            more = ["…"] if len(self._faults) > MOST_NAMES + 1 else []
            error = UsageError if started else RendezvousError
            raise error("; ".join([*self._faults[: MOST_NAMES + 1], *more]))
        return self._links

    def _accept(self) -> None:
        while (link := self.listener.accept()) is not None:
            self._check(link)
        for rejected in self.listener.rejected:
            address, _, reason = rejected.partition(": ")
            self._say(f"note: {address} was rejected: {reason}")
        self.listener.rejected.clear()
        if len(self._links) == len(self.expected):
            self.loop.stop()

    def _check(self, link: AuthenticatedLink) -> None:
        """Accepts or rejects an agent; one that has left may come again."""
        for other in list(self._links):
            other.receive()  # heartbeats
            if other.closed:
                other.close()
                self._links.remove(other)
        reason = None if self.node is None else self.node.reject_reason(link.peer_info) or self._twice(link)
        if reason is None:
            self._links.append(link)
            return
        reject([link], f"error: {reason}")
        if self.node is not None and self.node.launcher is not None:
            self._failed(reason)  # no other will be started
        else:
            self._say(f"note: {host_name(link)} ({link.address[0]}) was rejected: {reason}")

    def _twice(self, link: AuthenticatedLink) -> str | None:
        assert self.node is not None
        number = link.peer_info["index"]
        for other in self._links:
            if other.peer_info["index"] == number:
                first = f"{host_name(other)} ({other.address[0]}) is it"
                return f"{self.node.word} {number} is there twice, and {first}: give each host a --node-rank of its own"
        return None

    def _reject_all(self, reason: str) -> None:
        if self.node is not None:
            reject(self._links, reason)
        for link in self._links:
            link.close()

    def _failed(self, reason: str) -> None:
        self._faults.append(reason)
        if len(self._faults) == 1:
            self.loop.at(TOGETHER_S, self.loop.stop)

    def _name(self, link: AuthenticatedLink) -> str:
        index = link.peer_info.get("index")
        return next((name for name in self.expected if name.endswith(f" {index}")), host_name(link))

    def _missing(self) -> str:
        known = {self._name(link) for link in self._links}
        names = [name for name in self.expected if name not in known] or self.expected
        return ", ".join(names if len(names) <= MOST_NAMES else [*names[:MOST_NAMES], "…"])

    def _too_late(self) -> None:
        missing, of = len(self.expected) - len(self._links), len(self.expected)
        count = f" ({missing} of the {of} that were waited for)" if of > 1 else ""
        late = f"waited {self._seconds:.0f} s, and {self._missing()} never came{count}"
        self._faults = [f"{late}: start samestep there too, or see whether this host can be reached from there"]
        self.loop.stop()


def start_by_transport(spec: TransportSpec, say: Say) -> tuple[list[AgentConnection], list[Started]]:
    """Starts an agent on every host and returns them in their order, with what keeps them alive."""
    token = new_token()
    with Listener(token) as listener:
        started = start(spec.starts(), spec.join_info(listener.port, token))
        try:
            where = f" to answer over {spec.via} and to connect to this host"
            links = AgentJoin(spec.hosts, listener, say, where).collect(CONNECT_S, started, spec.python)
        except BaseException:
            stop_transports(started)
            raise
    aliases = {host: ssh_aliases(host, spec.ssh_args) for host in spec.hosts}
    return ordered([connection_of(link) for link in links], spec.hosts, aliases), started


def stop_transports(started: Sequence[Started]) -> None:
    for one in started:
        one.release()
    wait_all([one.process for one in started], LEAVE_S)
    for one in started:
        one.end()


def ssh_aliases(host: str, ssh_args: str = "") -> set[str]:
    """Returns what else ssh calls a host: the name or address that its configuration has for it."""
    done = subprocess.run(
        ["ssh", *shlex.split(ssh_args), "-G", host], capture_output=True, text=True, errors="replace", check=False
    )
    found = [line.split(maxsplit=1)[1] for line in done.stdout.splitlines() if line.startswith("hostname ")]
    machine = host.rpartition("@")[2]
    return {machine, machine.partition(".")[0], *found}


def wait_for_agents(node: NodeSpec, ranks: int, say: Say) -> list[AgentConnection]:
    """Returns this agent and those that others have started, in the order of their numbers; its own is 0."""
    own = open_here(socket.gethostname(), ranks)
    loop = Loop()
    hint = "; if it is node 0 of this run that has it, this host is another node: give it another --node-rank"
    try:
        with JoinSource(node).opened(loop, hint if node.port else "") as listener:
            names = [f"{node.word} {index}" for index in range(1, node.count)]
            where = f" to come in at {node.where}" if node.launcher is None else ""
            links = AgentJoin(names, listener, say, where, node, loop).collect(node.join_timeout)
    except BaseException:
        own.link.close()
        raise
    return [own, *(connection_of(link) for link in sorted(links, key=lambda link: int(link.peer_info["index"])))]


# --- replacements ---------------------------------------------------------------------------------


@dataclass
class Replacement:
    """Brings back the hosts that a run has lost, between two attempts.

    `source` is where they come from, None where there is this host alone, whose agent is forked; `preflight` returns
    the parts of all hosts of the controller, after all checks, and gives warnings to its argument.
    """

    controller: Controller
    source: TransportSource | JoinSource | None
    preflight: Callable[[Callable[[str], None]], Sequence[HostRanks]]
    seconds: float
    say: Say

    def bring_back(self, prepare: Callable[[tuple[HostRanks, ...]], object]) -> tuple[HostRanks, ...]:
        """Returns the parts of all hosts when none is missing, and all have been examined and prepared.

        Raises:
            Interruption: a signal has ended the wait.
            SamestepError: no replacement has come, or none that fits; says why.
        """
        self._late = self._broken_off = False
        self._new: set[int] = set()  # hosts that have connected
        self._rejected: set[int] = set()
        self._say_once = functools.cache(self.say)
        try:
            with self.controller.between_attempts() as loop:
                alarm = loop.at(self.seconds, functools.partial(self._too_late, loop))
                try:
                    with self._opened(loop):
                        return self._complete(loop, prepare)
                finally:
                    alarm.cancel()
        except RendezvousError as error:  # another process has the port by now
            raise SamestepError(f"no replacement can come in: {error}") from error

    @contextmanager
    def _opened(self, loop: Loop) -> Iterator[None]:
        if self.source is None:
            yield
            return
        with self.source.opened(loop) as listener:
            loop.watch(listener.fileno(), functools.partial(self._accept, loop, listener))
            try:
                yield
            finally:
                loop.forget(listener.fileno())

    def _complete(self, loop: Loop, prepare: Callable[[tuple[HostRanks, ...]], object]) -> tuple[HostRanks, ...]:
        while True:
            try:
                if not self._fill(loop):
                    break
                parts = tuple(self.preflight(lambda _: None))  # its warnings were shown at the start
                prepare(parts)
            except SamestepError as fault:
                self._broken_off = True
                if not self._missing() and not self._reject_new(str(fault)):
                    raise SamestepError(str(fault)) from fault
            else:
                return parts
        missing = self._missing()
        names = ", ".join(host.host for host in missing.values())
        reasons = {} if self.source is None else self.source.reasons
        why = "; ".join(dict.fromkeys(reasons[number] for number in missing if number in reasons))
        raise SamestepError(
            f"no replacement came within {self.seconds:g} s for host {names}{f' ({why})' if why else ''}"
        )

    def _missing(self) -> dict[int, AgentConnection]:
        return {number: host for number, host in enumerate(self.controller.hosts) if host.gone}

    def _fill(self, loop: Loop) -> bool:
        """Starts agents until none is missing; returns False when the time is up."""
        while missing := self._missing():
            if self._late:
                return False
            for number, host in missing.items():
                self._start(number, host)
            if self._missing():
                loop.run()
        if self._broken_off:
            self.controller.discard_answers()
        return True

    def _start(self, number: int, host: AgentConnection) -> None:
        if host.address is None:
            self._say_once(f"the agent of this host, {host.host}, has ended: starting another")
            self.controller.reopen(host)
            self._new.add(number)
            return
        assert self.source is not None
        if number not in self._rejected:
            limit = f"for up to {self.seconds:g} s (--join-timeout)"
            waiting = self.source.waiting_text(number, host, limit)
            self._say_once(f"host {host.host} is lost ({host.fault}): {waiting}")
        self.source.start(number, host)

    def _accept(self, loop: Loop, listener: Listener) -> None:
        assert self.source is not None
        while (link := listener.accept()) is not None:
            number, new = link.peer_info.get("index"), connection_of(link)
            lost = self._missing().get(number) if isinstance(number, int) else None
            node = self.source.node
            reason = None if node is None else node.reject_reason(link.peer_info)
            if number is None or lost is None or reason is not None:
                reason = reason or f"number {number} is not missing"
                self._say_once(f"note: {new.host} joined and was rejected: {reason}")
                self._tell_rejected(new, reason)
                link.close()
            elif self.source.accept(number, new):
                self.controller.replace(lost, new)
                self._new.add(number)
                self._rejected.discard(number)
                loop.stop()
            else:
                link.close()

    def _reject_new(self, reason: str) -> bool:
        """Rejects the agents that have connected; returns whether there were any."""
        hosts = self.controller.hosts
        rejected, self._new = {number for number in self._new if hosts[number].address is not None}, set()
        for number in rejected:
            assert self.source is not None
            self._say_once(f"note: {hosts[number].host} cannot take the place: {reason}")
            self._tell_rejected(hosts[number], reason)
            self.controller.hang_up(hosts[number], reason)
            self.source.failed(number, reason)
        self._rejected |= rejected
        return bool(rejected)

    def _tell_rejected(self, new: AgentConnection, reason: str) -> None:
        """Tells an agent that has connected why it cannot stay, if a user reads its output."""
        if self.source is not None and self.source.node is not None:
            reject([new.link], f"error: {reason}")

    def _too_late(self, loop: Loop) -> None:
        self._late = True
        loop.stop()
