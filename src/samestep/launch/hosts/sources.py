"""Where the agents of other hosts come from: a transport starts them, or a person, srun or mpiexec does."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from samestep.errors import RendezvousError, UsageError
from samestep.launch.agent import JoinInfo
from samestep.launch.controller import AgentConnection, Controller
from samestep.launch.event_loop import Alarm, Loop
from samestep.launch.hosts import rendezvous_file
from samestep.launch.hosts.network import addresses
from samestep.launch.hosts.secure_link import Listener, new_token
from samestep.launch.hosts.transport import Start, Started, agent_command, explain, start
from samestep.launch.hosts.transport import plan as plan_transport
from samestep.launch.link import Link
from samestep.rankenv import RankVariables

JOIN_TIMEOUT_S = 300.0  # for agents that others start; a queue may start hosts one by one
CONNECT_S = 15.0  # for agents that a transport starts
LEAVE_S = 2.0  # for a transport, or an agent, to end
RETRY_S = 1.0  # between two tries to start an agent
REFRESH_S = 60.0  # after which the rendezvous file is written anew
ANY_ADDRESS = "0.0.0.0"  # noqa: S104  (the others must reach it)
SHOWN = 60  # characters of a command that a message repeats


# --- hosts that a transport reaches ---------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TransportSpec:
    """Hosts that a transport reaches; `variables` go along, for sshd passes none on."""

    hosts: tuple[str, ...]
    via: str = "ssh"
    ssh_args: str = ""
    python: str | None = None
    variables: dict[str, str] = field(default_factory=dict)

    def starts(self) -> list[Start]:
        return plan_transport(self.via, self.hosts, agent_command(self.python), self.ssh_args)

    def join_info(self, port: int, token: str, index: int | None = None) -> str:
        here = tuple(interface.address for interface in addresses())
        known = JoinInfo(addresses=here, port=port, token=token, directory=str(Path.cwd()), variables=self.variables)
        return json.dumps(asdict(replace(known, index=index)))


def stream_descriptors(one: Started) -> list[int]:
    return [stream.fileno() for stream in (one.process.stdout, one.process.stderr) if stream is not None]


class TransportMonitor:
    """Reads what a transport says for as long as its agents are on their way, and reports one that will not come."""

    def __init__(self, loop: Loop, one: Started, failed: Callable[[str], None], python: str | None = None) -> None:
        self._loop = loop
        self._one = one
        self._failed = failed
        self._python = python
        self._lines: defaultdict[str, list[str]] = defaultdict(list)  # by host, "" where that is unknown
        self._codes: dict[str, int] = {}
        self._reported: set[str] = set()
        self._handle = os.pidfd_open(one.process.pid)
        for descriptor in stream_descriptors(one):
            os.set_blocking(descriptor, False)
            loop.watch(descriptor, partial(self._read, descriptor))
        loop.watch(self._handle, self._on_end)

    def close(self) -> None:
        """Reads no more; the transport goes on, and its pipes stay open."""
        for descriptor in (*stream_descriptors(self._one), self._handle):
            self._loop.forget(descriptor)
        os.close(self._handle)

    def _read(self, descriptor: int) -> bool:
        try:
            data = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return False
        for line in data.splitlines():
            found = self._one.parse_line(line)
            if found.exit_code is not None:
                self._codes[found.host or ""] = found.exit_code
                self._report(found.host)
            else:
                self._lines[found.host or ""].append(found.text)
        if not data:
            self._loop.forget(descriptor)
        return bool(data)

    def _on_end(self) -> None:
        self._loop.forget(self._handle)
        for descriptor in stream_descriptors(self._one):
            while self._read(descriptor):
                pass
        host = self._one.start.hosts[0]
        self._codes[host] = self._one.process.wait()
        if not self._reported:
            self._report(host)

    def _report(self, host: str | None) -> None:
        name = host or self._one.start.hosts[0]
        if name not in self._reported:
            self._reported.add(name)
            known = name if name in self._lines or name in self._codes else ""
            text = "\n".join(self._lines[known])
            self._failed(explain(name, self._one.start.via, self._codes.get(known), text, self._python))


# --- agents that others start ---------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class NodeSpec:
    """One of `count` processes that a person, srun or mpiexec has started; number 0 leads.

    They meet at `address` and `port`, or through a file; `named` is how a person has written that, and `bind` the
    address at which number 0 listens. All were started with the same `program`; `launcher` is what has started them,
    in the words of samestep.rankenv, None for a person.
    """

    index: int
    count: int
    address: str | None = None
    port: int = 0
    token: str = ""
    file: Path | None = None
    join_timeout: float = JOIN_TIMEOUT_S
    launcher: str | None = None
    named: str = ""
    bind: str = ANY_ADDRESS
    program: tuple[str, ...] = ()

    @property
    def word(self) -> str:
        return "node" if self.launcher is None else "task"

    @property
    def where(self) -> str:
        local = self.address is not None and self.bind != ANY_ADDRESS and self.address not in self.named
        return f"{self.named} ({self.address}, which only this host can reach)" if local else self.named

    @property
    def command(self) -> dict[str, str]:
        """What this process was told to run: a digest, and so much of it as a message shows."""
        text = shlex.join(self.program)
        short = text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"
        return {"program": hashlib.sha256(repr(self.program).encode()).hexdigest(), "command": short}

    def reject_reason(self, peer: Mapping[str, Any]) -> str | None:
        """Returns why what an agent says of itself makes it none of this run; None where it is one."""
        number = peer.get("index")
        if not isinstance(number, int) or not 0 < number < self.count:
            return f"{self.word} {number} is none of 1 to {self.count - 1}: give each host a --node-rank of its own"
        if peer.get("program", self.command["program"]) != self.command["program"]:
            return (
                f"{self.word} {number} was started with `{peer.get('command')}` and {self.word} 0 with "
                f"`{self.command['command']}`: give the same command on all"
            )
        return None


def node_spec(task: RankVariables, join_timeout: float = JOIN_TIMEOUT_S, program: Sequence[str] = ()) -> NodeSpec:
    file = rendezvous_file.rendezvous_path(task)
    return NodeSpec(
        index=task.rank,
        count=task.size,
        file=file,
        token=new_token(),
        join_timeout=join_timeout,
        launcher=task.source,
        named=str(file),
        program=tuple(program),
    )


def reject(links: Sequence[Link], reason: str, code: int = UsageError.exit_code) -> None:
    """Tells agents that are commands of their own how the run has ended for them, and lets them go first.

    Hung up on at once, they might lose what was said: what they send then is answered by a reset.
    """
    for link in links:
        link.send({"kind": "run_ended", "exit": code, "said": reason})
    until = time.monotonic() + LEAVE_S
    for link in links:
        while not link.closed and (left := until - time.monotonic()) > 0:
            link.wait(left, reads=True)
            link.flush()
            link.receive()


def notify_end(controller: Controller, text: str, code: int) -> None:
    reject([host.link for host in controller.hosts if host.address is not None and not host.gone], text, code)


# --- replacements ---------------------------------------------------------------------------------

# Both classes let agents connect that take the place of lost ones. Hosts go by their place in the run, from 0;
# `reasons` say why no agent has joined yet; `node` is this process's own, where others start agents.


@dataclass
class _Try:
    """An agent that was started anew; `monitor` until it has connected."""

    name: str
    started: Started
    alarm: Alarm
    monitor: TransportMonitor | None


class TransportSource:
    """Starts agents again over the transport, until ssh or the host has no more objection."""

    node: NodeSpec | None = None

    def __init__(
        self, spec: TransportSpec, started: list[Started], controller: Controller, show: Callable[[bytes], None]
    ) -> None:
        self.reasons: dict[int, str] = {}
        self._spec = spec
        self._started = started  # what keeps the agents alive; kept up to date
        self._controller = controller
        self._show = show
        self._tries: dict[int, _Try] = {}

    @contextmanager
    def opened(self, loop: Loop) -> Iterator[Listener]:
        self._loop = loop
        self._pausing: dict[int, Alarm] = {}
        self._token = new_token()
        with Listener(self._token) as self._listener:
            try:
                yield self._listener
            finally:
                for alarm in self._pausing.values():
                    alarm.cancel()
                for one in self._tries.values():
                    if one.monitor is not None:  # those that have connected stay
                        self._drop(one)
                self._tries.clear()

    def waiting_text(self, number: int, host: AgentConnection, limit: str) -> str:  # noqa: ARG002
        return f"trying to start its agent again over {self._spec.via}, {limit}"

    def start(self, number: int, host: AgentConnection) -> None:
        """Starts an agent in its place, unless one is on the way."""
        if number in self._pausing or (number in self._tries and self._tries[number].monitor is not None):
            return
        self._tries.pop(number, None)
        for one in [one for one in self._started if one.start.hosts == (host.host,)]:
            self._forget(one)  # what had started the lost agent; what has started others too goes on
        info = self._spec.join_info(self._listener.port, self._token, number)
        (started,) = start(replace(self._spec, hosts=(host.host,)).starts(), info)
        self._started.append(started)
        monitor = TransportMonitor(self._loop, started, partial(self.failed, number), self._spec.python)
        alarm = self._loop.at(CONNECT_S, partial(self.failed, number, f"nothing came in {CONNECT_S:.0f} s"))
        self._tries[number] = _Try(host.host, started, alarm, monitor)

    def accept(self, number: int, new: AgentConnection) -> bool:
        """Records an agent that has connected; returns False where it came too late."""
        current = self._tries.get(number)
        if current is None or current.monitor is None:
            return False
        new.host = current.name
        current.alarm.cancel()
        current.monitor.close()
        current.monitor = None
        self._controller.read_streams(stream_descriptors(current.started), self._show)
        return True

    def failed(self, number: int, reason: str) -> None:
        """Drops the agent that has connected, or is on the way."""
        self.reasons[number] = reason
        self._drop(self._tries.pop(number))
        self._pausing[number] = self._loop.at(RETRY_S, partial(self._retry, number))

    def _retry(self, number: int) -> None:
        del self._pausing[number]
        self._loop.stop()

    def _drop(self, current: _Try) -> None:
        current.alarm.cancel()
        if current.monitor is not None:
            current.monitor.close()
        self._forget(current.started)

    def _forget(self, one: Started) -> None:
        for descriptor in stream_descriptors(one):
            self._loop.forget(descriptor)
        self._started.remove(one)
        one.end()


class JoinSource:
    """Waits for agents that others start."""

    def __init__(self, node: NodeSpec) -> None:
        self.node = node
        self.reasons: dict[int, str] = {}

    @contextmanager
    def opened(self, loop: Loop, hint: str = "") -> Iterator[Listener]:
        """Lets agents connect until left; `hint` says what to do where another process has the port."""
        node = self.node
        try:
            listener = Listener(node.token, node.bind, node.port)
        except RendezvousError as error:
            raise RendezvousError(f"{error}{hint}") from error
        with listener:
            self._publish(loop, listener.port)
            try:
                yield listener
            finally:
                self._again.cancel()
                if node.file is not None:
                    node.file.unlink(missing_ok=True)

    def _publish(self, loop: Loop, port: int) -> None:
        """Writes where this process waits, if to a file again and again: an old one is taken for a leftover."""
        if self.node.file is not None:
            here = [interface.address for interface in addresses()]
            rendezvous_file.write(self.node.file, {"addresses": here, "port": port, "token": self.node.token})
        self._again = loop.at(REFRESH_S, partial(self._publish, loop, port))

    def waiting_text(self, number: int, host: AgentConnection, limit: str) -> str:
        node = self.node
        own = f"waiting {limit} for {node.word} {number} to come in"
        if node.file is None:
            return f"{own} at {node.address}:{node.port}: start the same command there again, or in its place"
        options = f"-n {len(host.ranks)} --nnodes {node.count} --node-rank {number} --rendezvous".split()
        command = shlex.join(["samestep", "run", *options, str(node.file), *node.program])
        return f"{own}; there, or in its place: {command}"

    def start(self, number: int, host: AgentConnection) -> None:
        """Does nothing: others start it."""

    def accept(self, number: int, new: AgentConnection) -> bool:  # noqa: ARG002
        return True

    def failed(self, number: int, reason: str) -> None:
        self.reasons[number] = reason
