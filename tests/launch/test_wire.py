"""Agents prove themselves, strangers disturb nobody, and no frame can be altered on its way."""

from __future__ import annotations

import select
import socket
import threading
import time

import pytest

from samestep.errors import RendezvousError
from samestep.launch.wire import Listener, connect, new_token

HERE = "127.0.0.1"


@pytest.fixture
def token():
    return new_token()


def meet(listener, token, port=None, about=None):
    """Returns both ends of a connection: the head's and the agent's."""
    found = []
    agent = threading.Thread(
        target=lambda: found.append(connect([HERE], port or listener.port, token, about or {"host": "b"}, seconds=10))
    )
    agent.start()
    head = wait_for_agent(listener)
    agent.join()
    return head, found[0]


def wait_for_agent(listener):
    poller = select.poll()
    poller.register(listener.fileno(), select.POLLIN)
    until = time.monotonic() + 20
    while time.monotonic() < until:
        poller.poll(100)
        if (link := listener.accept()) is not None:
            return link
    raise AssertionError("no agent came in")


def take(link, count=1):
    """Waits for messages on a link."""
    found = []
    poller = select.poll()
    poller.register(link.fileno(), select.POLLIN)
    while len(found) < count and not link.closed:
        poller.poll(10_000)
        found += link.receive()
    return found


@pytest.fixture
def ends(token):
    with Listener(token, HERE) as listener:
        head, agent = meet(listener, token)
    yield head, agent
    head.close()
    agent.close()


def test_both_sides_hear_each_other(ends):
    head, agent = ends
    assert head.peer_about == {"host": "b"}
    agent.send({"kind": "output", "rank": 3}, b"\x00bytes\xff")
    head.send({"kind": "order", "what": "stop"})
    (output,), (order,) = take(head), take(agent)
    assert (output.kind, output.body, output.payload) == ("output", {"rank": 3}, b"\x00bytes\xff")
    assert (order.kind, order.body) == ("order", {"what": "stop"})


def test_a_slow_reader_gets_everything_in_order(ends):
    head, agent = ends
    blocks = [bytes([number % 256]) * 100_000 for number in range(200)]
    for number, block in enumerate(blocks):
        agent.send({"kind": "output", "number": number}, block)  # 20 MB: more than any socket takes
    assert agent.wants_write()
    found = []
    while len(found) < len(blocks):
        found += head.receive()
        agent.flush()
    assert [message.payload for message in found] == blocks


def test_the_end_of_one_side_is_seen_by_the_other(ends):
    head, agent = ends
    agent.send({"kind": "last"})
    agent.close()
    assert [message.kind for message in take(head, 2)] == ["last"]
    assert head.closed


def test_another_token_is_refused_on_both_sides(token):
    with Listener(token, HERE) as listener:
        failures = []

        def attempt():
            try:
                connect([HERE], listener.port, new_token(), {}, seconds=1)
            except RendezvousError as error:
                failures.append(str(error))

        agent = threading.Thread(target=attempt)
        agent.start()
        while agent.is_alive():
            assert listener.accept() is None
        assert failures == ["the head of the run has another token: set the same SAMESTEP_TOKEN on every host"]
        assert listener.refused == ["127.0.0.1: it has another token"]


def test_a_head_that_does_not_know_the_token_is_not_believed(token):
    with socket.create_server((HERE, 0)) as impostor:

        def pretend():
            stream, _ = impostor.accept()
            with stream:
                stream.sendall(b'{"protocol": 1, "nonce": "00"}\n')
                stream.recv(1 << 16)
                stream.sendall(b'{"proof": "00"}\n')

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(RendezvousError, match="another token"):
            connect([HERE], impostor.getsockname()[1], token, {}, seconds=1)
        thread.join()


def test_nobody_at_any_address_is_told_with_what_was_tried(token):
    with socket.create_server((HERE, 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(
        RendezvousError, match=f"127.0.0.1:{port} Connection refused; 127.0.0.2:{port} Connection refused"
    ):
        connect([HERE, "127.0.0.2"], port, token, {}, seconds=0)


def test_a_thousand_idle_strangers_and_garbage_do_not_keep_an_agent_out(token):
    with Listener(token, HERE) as listener:
        strangers = []
        for number in range(1000):
            stranger = socket.create_connection((HERE, listener.port))
            if number % 3 == 0:
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            strangers.append(stranger)
            listener.accept()
        head, agent = meet(listener, token)
        agent.send({"kind": "hello"})
        assert [message.kind for message in take(head)] == ["hello"]
        for one in (head, agent, *strangers):
            one.close()


class Relay:
    """A real connection in between, which may change what passes from agent to head after the handshake."""

    def __init__(self, port, tamper):
        self.server = socket.create_server((HERE, 0))
        self.port = self.server.getsockname()[1]
        self.target = port
        self.tamper = tamper
        self.armed = threading.Event()
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def close(self):
        self.done.set()
        self.thread.join()

    def _run(self):
        left, _ = self.server.accept()
        right = socket.create_connection((HERE, self.target))
        with self.server, left, right:
            while not self.done.is_set():
                for source in select.select([left, right], [], [], 0.05)[0]:
                    data = source.recv(1 << 16)
                    if not data:
                        return
                    if source is left and self.armed.is_set():
                        data = self.tamper(data, left)
                    (right if source is left else left).sendall(data)


def twice(data, left):
    return data + data


def altered(data, left):
    return data[:-1] + bytes([data[-1] ^ 1])


def reflected(data, left):
    left.sendall(data)
    return b""


@pytest.mark.parametrize(("tamper", "taken"), [(twice, 1), (altered, 0)])
def test_a_frame_that_was_altered_or_repeated_ends_the_connection(token, tamper, taken):
    with Listener(token, HERE) as listener:
        relay = Relay(listener.port, tamper)
        head, agent = meet(listener, token, relay.port)
        relay.armed.set()
        agent.send({"kind": "pay"}, b"x" * 100)
        assert len(take(head, 2)) == taken
        assert "a frame that the other side has not sent, or not at this place" in head.fault
        relay.close()
        head.close()
        agent.close()


def test_a_frame_that_comes_back_to_its_sender_is_not_taken(token):
    with Listener(token, HERE) as listener:
        relay = Relay(listener.port, reflected)
        head, agent = meet(listener, token, relay.port)
        relay.armed.set()
        agent.send({"kind": "pay"})
        assert take(agent, 1) == []
        assert agent.fault is not None
        relay.close()
        head.close()
        agent.close()


def test_a_port_that_is_taken_is_said(token):
    with socket.create_server((HERE, 0)) as other, pytest.raises(RendezvousError, match="cannot listen at 127.0.0.1"):
        Listener(token, HERE, other.getsockname()[1])
