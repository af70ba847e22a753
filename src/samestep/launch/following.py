"""An agent that is a command of its own: `samestep run` on every host but the one that leads.

    by hand          a person sits there too, and is told where the output comes, why this host is not wanted, how
                     the run has ended
    srun, mpiexec    all tasks share one output, in which the head has said it: they are silent

torchrun's agents all tell of the same failure, each in its own many lines.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from samestep.launch.agent import Agent, Greeting
from samestep.launch.frames import Message
from samestep.launch.gather import SOON, Say
from samestep.launch.meeting import wait_for
from samestep.launch.sibling import NodeSpec
from samestep.launch.wire import SealedLink, connect

__all__: list[str] = []

WAITED_FOR_BY = 1  # the task that says for all that they wait for task 0
CUT_OFF = 1


class Follower(Agent):
    """Serves the head until it hangs up, or says that the run is over."""

    def __init__(self, link: SealedLink, about: Greeting) -> None:
        super().__init__(link, about)
        self._begun = False
        self.said: str | None = None  # how the run has ended, if the head told it

    def _follow(self, message: Message) -> None:
        self._begun = self._begun or message.kind != "alive"
        super()._follow(message)
        if message.kind == "over":
            self.said = message.body.get("said")
            if self.said is not None:
                self._loop.stop()

    def _signalled(self, number: int) -> None:
        if self._begun:
            super()._signalled(number)
        else:  # the head waits for others, and listens to nobody
            self.exit_code, self.said = 128 + number, f"interrupted by {signal.Signals(number).name}"
            self._loop.stop()


def run_foreground_agent(place: NodeSpec, ranks: int, say: Say) -> int:
    """Does this host's part of a run that another leads; returns the run's exit code.

    Raises:
        RendezvousError: the head cannot be reached, or is another run's.
    """
    with _patience(place, say):
        link, greeting = _come_in(place, ranks)
    by_hand = place.launcher is None
    if by_hand:
        bring = "1 rank, whose" if ranks == 1 else f"{ranks} ranks, whose"
        host = place.named.rpartition(":")[0] if place.file is None else link.address[0]
        say(f"node {place.index} of {place.count}: {bring} output comes on {host}")
    agent = Follower(link, greeting)
    agent.serve()
    link.close()  # who led waits for it
    if agent.exit_code is None:
        say("the head of the run has hung up: its host, or the network, is gone")
        return CUT_OFF
    if by_hand and agent.said is not None:
        say(agent.said)
    return agent.exit_code


def _come_in(place: NodeSpec, ranks: int) -> tuple[SealedLink, Greeting]:
    if place.file is not None:
        found = wait_for(place.file, place.patience)
        known = Greeting(addresses=tuple(found["addresses"]), port=found["port"], token=found["token"])
    else:
        assert place.address is not None
        known = Greeting(addresses=(place.address,), port=place.port, token=place.token)
    about = {"host": socket.gethostname(), "index": place.index, "pid": os.getpid(), **place.command}
    link = connect(known.addresses, known.port, known.token, about, seconds=place.patience)
    greeting = Greeting(addresses=known.addresses, port=known.port, token="", index=place.index, ranks=ranks)
    return link, greeting


@contextmanager
def _patience(place: NodeSpec, say: Say) -> Iterator[None]:
    """Says what is waited for when that lasts."""
    text = f"waiting for up to {place.patience:g} s for {place.word} 0 to answer at {place.where}"
    timer = threading.Timer(SOON, say, [text])
    if place.launcher is None or place.index == WAITED_FOR_BY:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if timer.is_alive():
            timer.join()  # ranks are forked from this process
