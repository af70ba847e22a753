"""Where an agent comes in that takes the place of a lost one, and what makes it come.

Calling     --hosts: it is started again over the transport, until ssh or the host has no more objection
Inviting    by hand, srun, mpiexec: this process listens where it did at first; somebody starts the agent
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from samestep.launch.gather import CONNECT, Hearing, TransportSpec, invite, refuse, stream_descriptors
from samestep.launch.head import Controller, Host
from samestep.launch.loop import Alarm, Loop
from samestep.launch.sibling import NodeSpec
from samestep.launch.transport import Started, start
from samestep.launch.wire import Listener, new_token

__all__: list[str] = []

RETRY = 1.0  # seconds between two tries to start an agent
REFRESH = 60.0  # seconds after which an invitation is written anew


class Door(Protocol):
    """Where agents come in during a wait, and what makes them come.

    Hosts go by their place in the run, from 0; `reasons` say why nobody has come so far, where that is known.
    """

    reasons: dict[int, str]

    def opened(self, loop: Loop) -> AbstractContextManager[Listener]:
        """Lets them in until left."""

    def awaited(self, number: int, host: Host, limit: str) -> str:
        """Returns what a person should know about the wait for a host, which has a limit."""

    def seek(self, number: int, host: Host) -> None:
        """Sees to it that somebody comes in its place, if nobody is on the way."""

    def objection(self, new: Host) -> str | None:
        """Returns why an agent that has come in is none of this run; None where it is one."""

    def turn_away(self, new: Host, reason: str) -> None:
        """Tells an agent that has come in why it cannot stay."""

    def came(self, number: int, new: Host) -> bool:
        """Takes note of an agent that has come in; returns whether it still counts."""

    def failed(self, number: int, reason: str) -> None:
        """Gives up who has come in, or is on the way."""


@dataclass
class _Try:
    """An agent that was started anew; `hearing` until it has come in."""

    name: str
    started: Started
    alarm: Alarm
    hearing: Hearing | None


class TransportSource:
    """A :class:`Door` to hosts that a transport reaches.

    Args:
        call: how the hosts of the run were called.
        started: what keeps their agents alive; kept up to date.
        head: reads what the transports say.
        show: where that goes.
    """

    def __init__(
        self, call: TransportSpec, started: list[Started], head: Controller, show: Callable[[bytes], None]
    ) -> None:
        self._call = call
        self._started = started
        self._head = head
        self._show = show
        self._tries: dict[int, _Try] = {}
        self.reasons: dict[int, str] = {}

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
                for number in list(self._tries):
                    self._conclude(number)

    def awaited(self, number: int, host: Host, limit: str) -> str:  # noqa: ARG002  (the protocol's)
        return f"trying to start its agent again over {self._call.via}, {limit}"

    def seek(self, number: int, host: Host) -> None:
        if number in self._pausing or (number in self._tries and self._tries[number].hearing is not None):
            return
        self._tries.pop(number, None)
        self._end(host.host)
        greeting = self._call.greeting(self._listener.port, self._token, number)
        (started,) = start(replace(self._call, hosts=(host.host,)).starts(), greeting)
        self._started.append(started)
        hearing = Hearing(self._loop, started, partial(self.failed, number), self._call.python)
        alarm = self._loop.at(CONNECT, partial(self.failed, number, f"nothing came in {CONNECT:.0f} s"))
        self._tries[number] = _Try(host.host, started, alarm, hearing)

    def objection(self, new: Host) -> str | None:  # noqa: ARG002
        return None  # it was started from here

    def turn_away(self, new: Host, reason: str) -> None:
        """Nobody sits there."""

    def came(self, number: int, new: Host) -> bool:
        current = self._tries.get(number)
        if current is None or current.hearing is None:
            return False
        new.host = current.name
        current.alarm.cancel()
        current.hearing.leave()
        current.hearing = None
        self._head.attend(stream_descriptors(current.started), self._show)
        return True

    def failed(self, number: int, reason: str) -> None:
        self.reasons[number] = reason
        self._drop(self._tries.pop(number))
        self._pausing[number] = self._loop.at(RETRY, partial(self._ready, number))

    def _ready(self, number: int) -> None:
        del self._pausing[number]
        self._loop.stop()

    def _conclude(self, number: int) -> None:
        """Leaves those alone who have come, and gives up the others."""
        current = self._tries.pop(number)
        if current.hearing is not None:
            self._drop(current)

    def _drop(self, current: _Try) -> None:
        current.alarm.cancel()
        if current.hearing is not None:
            current.hearing.leave()
        self._forget(current.started)

    def _end(self, name: str) -> None:
        """Ends what had started the agent that is lost; what has started others too goes on."""
        for one in [one for one in self._started if one.start.hosts == (name,)]:
            self._forget(one)

    def _forget(self, one: Started) -> None:
        self._head.neglect(stream_descriptors(one))
        self._started.remove(one)
        one.end()


class JoinSource:
    """A :class:`Door` to hosts that somebody else starts.

    Args:
        place: this process's own among them.
        program: what runs there.
    """

    def __init__(self, place: NodeSpec, program: Sequence[str]) -> None:
        self._place = place
        self._program = list(program)
        self.reasons: dict[int, str] = {}

    @contextmanager
    def opened(self, loop: Loop) -> Iterator[Listener]:
        place = self._place
        with Listener(place.token, place.bind, place.port) as listener:
            self._invite(loop, listener.port)
            try:
                yield listener
            finally:
                self._again.cancel()
                if place.file is not None:
                    place.file.unlink(missing_ok=True)

    def _invite(self, loop: Loop, port: int) -> None:
        """Says where this process waits, now and again: what is old is taken for a leftover."""
        invite(self._place, port)
        self._again = loop.at(REFRESH, partial(self._invite, loop, port))

    def awaited(self, number: int, host: Host, limit: str) -> str:
        place = self._place
        own = f"waiting {limit} for {place.word} {number} to come in"
        if place.file is None:
            return f"{own} at {place.address}:{place.port}: start the same command there again, or in its place"
        words = [
            "samestep",
            "run",
            "-n",
            str(len(host.ranks)),
            "--nnodes",
            str(place.count),
            "--node-rank",
            str(number),
        ]
        command = shlex.join([*words, "--rendezvous", str(place.file), *self._program])
        return f"{own}; there, or in its place: {command}"

    def seek(self, number: int, host: Host) -> None:
        """Somebody else does."""

    def objection(self, new: Host) -> str | None:
        return self._place.objection(getattr(new.link, "peer_about", {}))

    def turn_away(self, new: Host, reason: str) -> None:
        refuse([new.link], f"error: {reason}")

    def came(self, number: int, new: Host) -> bool:  # noqa: ARG002
        return True  # under a name of its own

    def failed(self, number: int, reason: str) -> None:
        self.reasons[number] = reason
