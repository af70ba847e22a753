"""What an agent answers its controller; without ranks."""

from __future__ import annotations

import socket

import pytest

from samestep.launch.agent import Agent
from samestep.launch.link import Link, Message


@pytest.fixture
def asked():
    """Gives an agent one message and returns its answers."""
    ours, theirs = map(Link, socket.socketpair())
    agent = Agent(theirs)

    def ask(kind, **body):
        agent._on_message(Message(kind, body))
        return ours.receive()

    yield ask
    if agent._listener is not None:
        agent._listener.close()
    ours.close()
    theirs.close()


def test_a_port_for_the_store_is_held_until_the_ranks_start(asked):
    (bound,) = asked("bind", address="127.0.0.1")
    assert bound.kind == "bound"
    assert bound.body["port"] > 0


def test_an_address_at_which_nobody_can_listen_is_named_with_the_reason(asked):
    (unable,) = asked("bind", address="192.0.2.1")  # of documentation (RFC 5737): no host has it
    assert unable.kind == "start_failed"
    assert unable.body["reason"].startswith("cannot listen at 192.0.2.1, where the ranks meet: Cannot assign requested")


def test_that_all_ports_are_taken_is_said_with_what_shows_them(asked, monkeypatch):
    def listen(address):
        raise OSError(98, "Address already in use")

    monkeypatch.setattr("samestep.launch.agent.listen", listen)
    (unable,) = asked("bind", address="127.0.0.1")
    assert "Address already in use; `sysctl net.ipv4.ip_local_port_range`" in unable.body["reason"]
