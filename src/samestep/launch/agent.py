"""One small process per host: it holds the host's ranks, and does what the head says over one connection.

    head (samestep run)                agent                        team of ranks
      prepare {job}             ->       imports torch, once
                                <-       prepared {note}
      bind {address}            ->       opens the store's socket
                                <-       bound {port}
      start {job}               ->                                  N processes
                                <-       output, failed, waiting, cannot, preempted, ended
      order {what, ranks}       ->                                  stop, preempt, signal, terminate, kill
      clear                     ->                                  whatever they have left
                                <-       cleared {left}
    end of the connection       ->       kills all of it, and ends

On the head's own host it is a fork of the head: so the head may be killed in any way, and there is still somebody to
end the ranks, what they have started, and what has left their groups. On another host a transport starts it, and the
first line of its standard input says where the head is and with what word to come in: nothing secret is ever on a
command line.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from dataclasses import fields
from types import FrameType
from typing import Any, NoReturn

from samestep.launch.address import listen
from samestep.launch.frames import Link, Message
from samestep.launch.loop import Loop
from samestep.launch.process import adopt_orphans
from samestep.launch.team import Job, Team

__all__: list[str] = []

PASSED_ON = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)


class Agent:
    """Serves one head until it hangs up."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._loop = Loop()
        self._team = Team(self._loop, self._tell)
        self._listener: socket.socket | None = None

    def serve(self) -> None:
        """Does what it is told until the connection ends, then ends everything."""
        adopt_orphans()
        self._watch()
        try:
            self._loop.run()
        finally:
            self._team.end()

    def _watch(self) -> None:
        self._loop.watch(self._link.fileno(), self._hear, writable=self._link.wants_write())

    def _tell(self, kind: str, payload: bytes = b"", **body: Any) -> None:
        self._link.send({"kind": kind, **body}, payload)
        self._watch()

    def _hear(self) -> None:
        self._link.flush()
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
                self._listener = listen(body["address"])
                self._tell("bound", port=self._listener.getsockname()[1])
            case "start":
                self._start(job_from(body["job"]))
            case "order":
                self._team.order(body["what"], body["ranks"], body["number"])
            case "resize":
                self._team.resize()
            case "clear":
                self._tell("cleared", left=self._team.clear())

    def _start(self, job: Job) -> None:
        listener, self._listener = self._listener, None
        try:
            self._team.start(job, listener)
        except OSError as error:
            self._tell("unable", reason=f"cannot start {len(job.ranks)} ranks: {error}")

    def pass_on(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002  (a signal handler's)
        """Tells the head of a signal that reached this process."""
        self._tell("signalled", number=number)


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
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()  # the keyboard's signals are the head's
        ours.close()
        live(link)
    finally:
        os._exit(70)


def live(link: Link) -> NoReturn:
    """Serves the head at the other end of `link`, deaf to signals: it is the head that decides."""
    for number in PASSED_ON:
        signal.signal(number, _nothing)
    Agent(link).serve()
    os._exit(0)


def _nothing(number: int, frame: FrameType | None) -> None:
    """Not SIG_IGN: that would be inherited by ranks in fresh interpreters."""
