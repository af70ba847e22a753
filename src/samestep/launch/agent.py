"""The process on each host that starts and watches the host's ranks, as the controller tells it over one connection.

On the controller's host it is a fork of the controller, which survives to end the ranks when the controller is killed.
On another host a transport starts it, and writes the controller's address and token to its standard input.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, NoReturn

from samestep.errors import RendezvousError, UsageError
from samestep.launch.event_loop import PASSED_ON, Loop, signals
from samestep.launch.hosts.host_info import inspect_host
from samestep.launch.hosts.network import ProbeServer, ProbeTarget, interface_named, probe, route_to
from samestep.launch.hosts.secure_link import AuthenticatedLink, connect
from samestep.launch.link import Link, Message
from samestep.launch.local_ranks import Job, LocalRanks
from samestep.launch.monitor.heartbeat import HeartbeatMonitor
from samestep.launch.process import (
    become_subreaper,
    die_with_parent,
    open_missing_streams,
    raise_file_limit,
    survive_parent,
)
from samestep.launch.rank.environment import threads_per_rank
from samestep.launch.rank.store import listen
from samestep.launch.start.fork import import_torch
from samestep.rankenv import set_variables
from samestep.schema import from_json, parse_object

MOST_HELD = 4 << 20  # bytes of output on their way to the controller
UNACKNOWLEDGED_S = 10.0  # without any answer from the controller's kernel after which it is gone
HEARTBEAT_S = 1.0
REAP_S = 5.0  # between looks for ended orphans
PROBE_S = 3.0  # for another host to answer
CONNECT_S = 10.0  # in which the controller must be found


@dataclass(frozen=True, kw_only=True)
class JoinInfo:
    """What an agent on another host must know to connect; one JSON line.

    `addresses` and `port` are the controller's; `index` is the host's place among the hosts and `ranks` how many it
    brings, where that is known.
    """

    addresses: tuple[str, ...]
    port: int
    token: str
    directory: str = "."
    variables: dict[str, str] = field(default_factory=dict)
    index: int | None = None
    ranks: int | None = None


class Agent:
    """Serves a controller, on this host or on another one.

    When the input `lifeline` ends, the transport is gone, and it ends as if the controller had hung up.
    """

    def __init__(self, link: Link, info: JoinInfo | None = None, lifeline: int | None = None) -> None:
        self._link = link
        self._info = info
        self._loop = Loop()
        self._ranks = LocalRanks(self._loop, self._send)
        self._paused = False  # the ranks' output is not read
        self._listener: socket.socket | None = None
        self._probe_server: ProbeServer | None = None
        self.exit_code: int | None = None  # of the run, if the controller told it
        if lifeline is not None:
            self._loop.watch(lifeline, partial(self._read_lifeline, lifeline))

    def serve(self) -> None:
        """Carries out commands until the connection ends, then ends everything.

        The controller decides on signals: from another host, where a scheduler may have signalled this process alone,
        they are passed on to it; on its own host they are ignored, since it gets the same signal itself.
        """
        become_subreaper()
        raise_file_limit()
        self._watch()
        if self._info is not None:
            self._send_alive()
        self._reap_strays()
        HeartbeatMonitor(self._loop, self._ranks.records, lambda kind, body: self._send(kind, **body))
        with signals(self._loop, PASSED_ON, self._on_signal):
            try:
                self._loop.run()
            finally:
                self._ranks.kill_all()

    def _read_lifeline(self, lifeline: int) -> None:
        if not os.read(lifeline, 4096):
            self._loop.forget(lifeline)
            self._loop.stop()

    def _send_alive(self) -> None:
        if isinstance(self._link, AuthenticatedLink) and self._link.unacknowledged_s() > UNACKNOWLEDGED_S:
            self._loop.stop()  # the network is gone, and the controller with it
        self._send("alive")
        self._loop.at(HEARTBEAT_S, self._send_alive)

    def _reap_strays(self) -> None:
        self._ranks.reap_strays()
        self._loop.at(REAP_S, self._reap_strays)

    def _on_signal(self, number: int) -> None:
        if self._info is not None:
            self._send("signal", number=number)

    def _watch(self) -> None:
        self._loop.watch(self._link.fileno(), self._receive, writable=bool(self._link.pending))

    def _send(self, kind: str, payload: bytes = b"", **body: Any) -> None:
        self._link.send({"kind": kind, **body}, payload)
        self._pause_if_slow()
        self._watch()

    def _pause_if_slow(self) -> None:
        """Lets the ranks wait for their pipes while the controller does not keep up; commands are taken as ever."""
        pause = self._link.pending > MOST_HELD // (4 if self._paused else 1)
        if pause != self._paused:
            self._paused = pause
            self._ranks.pause(pause=pause)

    def _receive(self) -> None:
        self._link.flush()
        self._pause_if_slow()
        for message in self._link.receive():
            self._on_message(message)
        if self._link.closed:
            self._loop.forget(self._link.fileno())
            self._loop.stop()
        else:
            self._watch()

    def _on_message(self, message: Message) -> None:
        body = message.body
        match message.kind:
            case "prepare":
                self._send("prepared", note=self._ranks.prepare(from_json(Job, body["job"])))
            case "bind":
                self._bind(body["address"])
            case "start":
                self._start(from_json(Job, body["job"]))
            case "command":
                self._ranks.command(body["what"], body["ranks"], body["number"])
            case "pace":
                self._ranks.show_pace(body["text"])
            case "resize":
                self._ranks.resize()
            case "inspect":
                ranks = None if self._info is None else self._info.ranks
                info = inspect_host(body["program"], is_module=body["is_module"], name=body["name"], ranks=ranks)
                self._send("info", info=asdict(info))
            case "open_probe":
                server = self._probe_server = ProbeServer(body["address"])
                self._loop.watch(server.fileno(), server.serve_ready)
                self._send("probe_open", port=server.port, nonce=server.nonce)
            case "probe":
                self._send("probed", **self._probe(body))
            case "close_probe":
                if self._probe_server is not None:
                    self._loop.forget(self._probe_server.fileno())
                    self._probe_server.close()
                    self._probe_server = None
            case "run_ended":
                self.exit_code = body["exit"]
            case "cleanup":
                self._ranks.cleanup()
                self._send("cleaned")

    def _bind(self, address: str) -> None:
        try:
            self._listener = listen(address)
        except OSError as error:  # EADDRINUSE: of all ports that the kernel gives, none is free
            fix = "; `sysctl net.ipv4.ip_local_port_range` says which ports there are, `ss -tan` who has them"
            reason = f"cannot listen at {address}, where the ranks meet: {error.strerror}"
            self._send("start_failed", reason=reason + (fix if error.errno == errno.EADDRINUSE else ""))
        else:
            self._send("bound", port=self._listener.getsockname()[1])

    def _start(self, job: Job) -> None:
        listener, self._listener = self._listener, None
        survive_parent()  # until now there was nothing to clear away
        try:
            self._ranks.start(job, listener)
        except OSError as error:
            self._send("start_failed", reason=f"cannot start {len(job.ranks)} ranks: {error}")

    def _probe(self, body: dict[str, Any]) -> dict[str, Any]:
        targets = {name: ProbeTarget(**target) for name, target in body["targets"].items()}
        requested = body["interface"]
        try:
            chosen = interface_named(requested) if requested else None
        except UsageError as error:
            return {"fault": str(error)}
        reached = probe(targets, PROBE_S, self._probe_server)
        ways = [way for target in targets.values() if (way := route_to(target.address)) is not None]
        ways.sort(key=lambda way: way.is_loopback)  # part of a run on this host, part elsewhere
        name = chosen.name if chosen is not None else next((way.name for way in ways), None)
        return {"reached": reached, "interface": name}


def serve_parent(end: socket.socket, parent: int, ranks: int) -> NoReturn:
    """Serves the controller, of which this process is a fork; first imports torch for so many ranks, if there are any.

    `end` is this process's end of the connection.
    """
    os.setsid()  # the keyboard's signals are the controller's
    die_with_parent(parent)  # importing torch takes seconds in which it hears nothing
    if ranks:
        signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
        import_torch(threads_per_rank(ranks))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    Agent(Link(end)).serve()
    os._exit(0)


def main() -> int:
    """Serves the controller that the first line of standard input names; a transport starts it on another host."""
    open_missing_streams()
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            return 0  # the process that started this is gone already
        line += byte
    info = from_json(JoinInfo, parse_object(bytes(line)))
    try:
        os.chdir(info.directory)
        set_variables(info.variables)
        about = {"host": socket.gethostname(), "index": info.index}
        link = connect(info.addresses, info.port, info.token, about, seconds=CONNECT_S, patient=False)
    except OSError as error:
        sys.stderr.write(f"samestep: error: cannot work in {info.directory} here: {error.strerror}\n")
        return 2
    except RendezvousError as error:
        sys.stderr.write(f"samestep: error: {error}\n")
        return 2
    Agent(link, info, lifeline=0).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
