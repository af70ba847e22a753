"""The agent that `samestep run` is on every host but the one that leads, where no transport has started it.

Started by hand it says what happens. Tasks of srun and mpiexec are silent: they share the controller's output.
"""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from samestep.launch.agent import Agent, JoinInfo
from samestep.launch.hosts.join import SAY_AFTER_S, Say
from samestep.launch.hosts.rendezvous_file import wait_for
from samestep.launch.hosts.secure_link import AuthenticatedLink, connect
from samestep.launch.hosts.sources import NodeSpec
from samestep.launch.link import Message
from samestep.text import plural

SPEAKS = 1  # the task that says for all that they wait for task 0
CUT_OFF = 1  # exit code


class ForegroundAgent(Agent):
    def __init__(self, link: AuthenticatedLink, info: JoinInfo) -> None:
        super().__init__(link, info)
        self._begun = False
        self.end_text: str | None = None  # how the run has ended, if the controller told it

    def _on_message(self, message: Message) -> None:
        self._begun = self._begun or message.kind != "alive"
        super()._on_message(message)
        if message.kind == "run_ended":
            self.end_text = message.body.get("said")
            if self.end_text is not None:
                self._loop.stop()

    def _on_signal(self, number: int) -> None:
        if self._begun:
            super()._on_signal(number)
        else:  # the controller waits for others, and reads no messages
            self.exit_code, self.end_text = 128 + number, f"interrupted by {signal.Signals(number).name}"
            self._loop.stop()


def run_foreground_agent(node: NodeSpec, ranks: int, say: Say) -> int:
    """Does this host's part of a run that another leads; returns the run's exit code.

    Raises:
        RendezvousError: the controller cannot be reached, or is another run's.
    """
    with _saying_what_is_waited_for(node, say):
        link, info = _connect(node, ranks)
    by_hand = node.launcher is None
    if by_hand:
        host = node.named.rpartition(":")[0] if node.file is None else link.address[0]
        say(f"node {node.index} of {node.count}: {plural(ranks, 'rank')}, whose output comes on {host}")
    agent = ForegroundAgent(link, info)
    agent.serve()
    link.close()  # the controller waits for it
    if agent.exit_code is None:
        say("the head of the run has hung up: its host, or the network, is gone")
        return CUT_OFF
    if by_hand and agent.end_text is not None:
        say(agent.end_text)
    return agent.exit_code


def _connect(node: NodeSpec, ranks: int) -> tuple[AuthenticatedLink, JoinInfo]:
    addresses, port, token = (str(node.address),), node.port, node.token
    if node.file is not None:
        found = wait_for(node.file, node.join_timeout)
        addresses, port, token = tuple(found["addresses"]), found["port"], found["token"]
    about = {"host": socket.gethostname(), "index": node.index, **node.command}
    link = connect(addresses, port, token, about, seconds=node.join_timeout)
    return link, JoinInfo(addresses=addresses, port=port, token="", index=node.index, ranks=ranks)


@contextmanager
def _saying_what_is_waited_for(node: NodeSpec, say: Say) -> Iterator[None]:
    text = f"waiting for up to {node.join_timeout:g} s for {node.word} 0 to answer at {node.where}"
    timer = threading.Timer(SAY_AFTER_S, say, [text])
    if node.launcher is None or node.index == SPEAKS:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if timer.is_alive():
            timer.join()  # ranks are forked from this process
