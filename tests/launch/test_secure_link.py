"""Agents prove themselves, strangers disturb nobody, and no frame can be altered on its way."""

from __future__ import annotations

import json
import os
import resource
import select
import socket
import threading
import time

import pytest

from samestep.errors import RendezvousError
from samestep.launch.controller import connection_of
from samestep.launch.hosts import secure_link
from samestep.launch.hosts.secure_link import Listener, connect, new_token
from samestep.launch.link import frame

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
    assert head.peer_info == {"host": "b"}
    agent.send({"kind": "output", "rank": 3}, b"\x00bytes\xff")
    head.send({"kind": "order", "what": "stop"})
    (output,), (order,) = take(head), take(agent)
    assert (output.kind, output.body, output.payload) == ("output", {"rank": 3}, b"\x00bytes\xff")
    assert (order.kind, order.body) == ("order", {"what": "stop"})


def test_an_agent_that_does_not_say_what_its_host_is_called_goes_by_its_address(token):
    with Listener(token, HERE) as listener:
        head, agent = meet(listener, token, about={"index": 1})
    assert connection_of(head).host == HERE
    head.close()
    agent.close()


def test_what_an_agent_tells_of_itself_has_names(token):
    def attempt():
        with pytest.raises(RendezvousError):
            connect([HERE], listener.port, token, ["b"], seconds=1)

    with Listener(token, HERE) as listener:
        agent = threading.Thread(target=attempt)
        agent.start()
        while agent.is_alive():
            assert listener.accept() is None
        assert set(listener.rejected) == {"127.0.0.1: it said nothing that an agent says"}


def test_a_slow_reader_gets_everything_in_order(ends):
    head, agent = ends
    blocks = [bytes([number % 256]) * 100_000 for number in range(200)]
    for number, block in enumerate(blocks):
        agent.send({"kind": "output", "number": number}, block)  # 20 MB: more than any socket takes
    assert agent.pending
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


def test_a_link_that_had_nothing_to_say_is_not_unacknowledged_s(ends):
    _, agent = ends
    time.sleep(0.2)  # the silence itself is what is tested
    assert agent.unacknowledged_s() == 0.0


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
        assert failures == ["the controller uses a different token: set the same SAMESTEP_TOKEN on every host"]
        assert listener.rejected == ["127.0.0.1: it uses a different token"]


def test_a_head_that_does_not_know_the_token_is_not_believed(token):
    with socket.create_server((HERE, 0)) as impostor:

        def pretend():
            stream, _ = impostor.accept()
            with stream:
                stream.sendall(b'{"protocol": 2, "nonce": "00"}\n')
                stream.recv(1 << 16)
                stream.sendall(b'{"proof": "00"}\n')

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(RendezvousError, match="a different token"):
            connect([HERE], impostor.getsockname()[1], token, {}, seconds=1)
        thread.join()


def test_nobody_at_any_address_is_told_with_what_was_tried(token):
    with socket.create_server((HERE, 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(
        RendezvousError, match=f"127.0.0.1:{port} Connection refused; 127.0.0.2:{port} Connection refused"
    ):
        connect([HERE, "127.0.0.2"], port, token, {}, seconds=0)


def test_a_thousand_idle_pending_and_garbage_do_not_keep_an_agent_out(token):
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


def greet(listener):
    """Returns a stranger's connection and the head's nonce."""
    stranger = socket.create_connection((HERE, listener.port))
    until = time.monotonic() + 20
    while not select.select([stranger], [], [], 0.01)[0] and time.monotonic() < until:
        listener.accept()
    return stranger, json.loads(stranger.recv(1 << 16))["nonce"]


def refusals(listener, count=1):
    """Waits until so many were turned away."""
    until = time.monotonic() + 20
    while len(listener.rejected) < count and time.monotonic() < until:
        select.select([listener], [], [], 0.1)
        assert listener.accept() is None
    return listener.rejected


@pytest.mark.parametrize(
    "line",
    [
        b"[" * 60_000,
        b"[]",
        b"\xff\xfe",
        b'{"nonce": "00", "about": {}, "proof": "no"}',
        b'{"nonce": "\\ud800", "about": {}, "proof": "00"}',
        b'{"nonce": "00", "proof": "00", "about": ' + b"[" * 900 + b"]" * 900 + b"}",
        b"x" * (1 << 17),
    ],
    ids=["nested", "list", "no text", "no digits", "half a character", "nested about", "endless"],
)
def test_whatever_a_stranger_says_the_head_goes_on(token, line):
    with Listener(token, HERE) as listener:
        stranger, _ = greet(listener)
        with stranger:
            stranger.sendall(line + b"\n")
            assert len(refusals(listener)) == 1
        head, agent = meet(listener, token)
        head.close()
        agent.close()


def test_an_agent_that_lost_patience_does_not_come_in_twice(token):
    with Listener(token, HERE) as listener:
        stranger, nonce = greet(listener)
        proof = secure_link._mac(bytes.fromhex(token), "agent", nonce, "00", "{}").hex()
        stranger.sendall(json.dumps({"nonce": "00", "about": {}, "proof": proof}).encode() + b"\n")
        stranger.close()
        assert refusals(listener) == ["127.0.0.1: it left before it was heard"]


@pytest.fixture
def few_descriptors():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (600, hard))
    yield 600
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_pending_leave_the_head_most_of_its_descriptors(token, few_descriptors):
    with Listener(token, HERE) as listener:
        strangers = []
        for _ in range(250):
            strangers.append(socket.create_connection((HERE, listener.port)))
            listener.accept()
        assert len(listener._pending) == few_descriptors // 4
        for end in (*meet(listener, token), *strangers):
            end.close()


class Impostor:
    """Something else that listens: says one thing to everybody, then another, or a space now and then for ever."""

    def __init__(self, *lines):
        self.lines = lines
        self.server = socket.create_server((HERE, 0))
        self.port = self.server.getsockname()[1]
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *details):
        self.done.set()
        self.thread.join()
        self.server.close()

    def _run(self):
        while not self.done.is_set():
            if select.select([self.server], [], [], 0.05)[0]:
                with self.server.accept()[0] as stream:
                    try:
                        self._talk(stream)
                    except OSError:
                        continue  # the agent has heard enough

    def _talk(self, stream):
        for line in self.lines:
            stream.sendall(line + b"\n")
            stream.recv(1 << 16)
        while not self.lines and not self.done.wait(0.02):
            stream.sendall(b" ")


HELLO = b'{"protocol": 2, "nonce": "00"}'


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([b"SSH-2.0-OpenSSH_9"], "something else answers there"),
        ([b"[]"], "something else answers there"),
        ([b"[" * 5_000], "something else answers there"),
        ([b'{"protocol": 3}'], "not as the head of a run of this version"),
        ([HELLO, '{"proof": "é"}'.encode()], "uses a different token"),
        ([], "took too long|timed out"),
    ],
    ids=["ssh", "list", "nested", "version", "letters", "drip"],
)
def test_whoever_answers_in_place_of_the_head_is_named(token, lines, reason):
    with Impostor(*lines) as other, pytest.raises(RendezvousError, match=reason):
        connect([HERE], other.port, token, {}, seconds=20 if lines else 0.5, patient=False)


def test_a_try_that_ran_out_of_time_does_not_hide_who_answered(token):
    with socket.create_server((HERE, 0)) as server:

        def answer_once():
            with server.accept()[0] as stream:
                stream.sendall(b"SSH-2.0-OpenSSH_9\n")

        answering = threading.Thread(target=answer_once)
        answering.start()
        with pytest.raises(RendezvousError, match="something else answers there"):
            connect([HERE], server.getsockname()[1], token, {}, seconds=2)
        answering.join()


def test_the_head_of_another_run_at_the_first_address_does_not_hide_the_right_one(token):
    with (
        Impostor(HELLO, b'{"refused": "it uses a different token"}') as other,
        Listener(token, "127.0.0.2", other.port) as ours,
    ):
        found = []
        agent = threading.Thread(
            target=lambda: found.append(connect([HERE, "127.0.0.2"], other.port, token, {}, seconds=10))
        )
        agent.start()
        for end in (wait_for_agent(ours), agent.join() or found[0]):
            end.close()


def test_number_keys_do_not_look_like_another_token(token):
    with Listener(token, HERE) as listener:
        head, agent = meet(listener, token, about={"cores": {2: "a", 10: "b"}})
        assert head.peer_info == {"cores": {"2": "a", "10": "b"}}
        head.close()
        agent.close()


def frames(link, count):
    """Returns what a link would have put on its wire for so many messages."""
    return [link._wrap(frame({"kind": str(number)})) for number in range(count)]


def test_frames_out_of_order_or_with_one_missing_end_the_connection(token):
    for order in ((1, 0), (0, 2)):
        with Listener(token, HERE) as listener:
            head, agent = meet(listener, token)
            made = frames(agent, 3)
            agent._socket.sendall(b"".join(made[number] for number in order))
            assert [message.kind for message in take(head, 2)] == ["0"][: order[0] == 0]
            assert "not at this place" in head.fault
            head.close()
            agent.close()


def test_a_frame_of_one_connection_is_worth_nothing_in_another(token):
    with Listener(token, HERE) as listener:
        (head, agent), (other, another) = meet(listener, token), meet(listener, token)
        another._socket.sendall(frames(agent, 1)[0])
        assert take(other) == []
        assert "not at this place" in other.fault
        for end in (head, agent, other, another):
            end.close()


def test_a_connection_cut_within_a_message_says_so(ends):
    head, agent = ends
    agent._socket.sendall(frames(agent, 1)[0][:-1])
    agent.close()
    assert take(head) == []
    assert head.fault.endswith("was cut off in the middle of a message")


def test_nothing_is_kept_for_one_that_has_gone(ends):
    head, agent = ends
    agent.close()
    take(head)
    head.send({"kind": "order"}, b"x" * 1000)
    assert head.pending == 0


def test_a_message_that_is_too_large_is_refused_where_it_is_sent(ends):
    head, agent = ends
    with pytest.raises(ValueError, match="send it in parts"):
        agent.send({"kind": "output"}, b"x" * secure_link.MOST_FRAME)
    agent.send({"kind": "next"})
    assert [message.kind for message in take(head)] == ["next"]


def test_what_nobody_takes_ends_the_connection_before_memory_does(ends, monkeypatch):
    monkeypatch.setattr(secure_link, "MOST_WAITING", 1 << 20)
    _, agent = ends
    while not agent.closed:
        agent.send({"kind": "output"}, b"x" * 100_000)
    assert agent.fault.endswith("bytes untaken")
    assert agent.pending == 0


def test_no_program_started_later_inherits_the_connection(ends):
    assert [os.get_inheritable(end.fileno()) for end in ends] == [False, False]
