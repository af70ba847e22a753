"""Interfaces, ways and doorbells: on this machine, and between hosts with networks of their own."""

from __future__ import annotations

import ast
import json
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from namespaces import hosts

from samestep.errors import UsageError
from samestep.launch.network import Doorbell, Interface, Target, addresses, interface_named, probe, route_to

LOOPBACK = Interface("lo", "127.0.0.1", "255.0.0.0")
PATIENCE = 60.0  # seconds; nothing here takes one
SOON = 1.0  # seconds for those that never answer


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    with hosts(tmp_path_factory.mktemp("lab"), 3, servers=False) as built:
        yield built


@pytest.fixture
def lab_of_two(tmp_path):
    """A lab of one test's own, which may be changed."""
    with hosts(tmp_path, 2, servers=False) as own:
        yield own


IMPORTS = "from samestep.launch.network import Doorbell, Target, addresses, probe, route_to\n"


def ask(lab, name, expression):
    """Returns what an expression gives on a host."""
    code = f"{IMPORTS}print(repr({expression}))"
    return lab.run(name, [sys.executable, "-P", "-c", code]).stdout.strip()


RING = """
import selectors, sys
with Doorbell() as bell, selectors.DefaultSelector() as selector:
    print(bell.port, bell.nonce, flush=True)
    selector.register(bell, selectors.EVENT_READ)
    selector.register(sys.stdin, selectors.EVENT_READ)
    while all(key.fileobj is bell for key, _ in selector.select()):
        bell.serve_ready()
"""


class Bells:
    """Doorbells that ring on hosts until this is closed."""

    def __init__(self, lab, names):
        self._lab = lab
        self._ends = ExitStack()
        piped = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._at = {}
        for name in names:
            ringing = lab.start(name, [sys.executable, "-P", "-c", IMPORTS + RING], **piped)
            self._ends.callback(ringing.wait)
            self._ends.enter_context(ringing.stdout)
            self._ends.callback(ringing.stdin.close)
            port, nonce = ringing.stdout.readline().split()
            self._at[name] = (lab.address(name), int(port), nonce)

    def tried_from(self, source, seconds=PATIENCE):
        """Returns what a host finds when it tries all the others, and how long that took there."""
        targets = {name: place for name, place in self._at.items() if name != source}
        code = (
            f"{IMPORTS}import json, time\nbegan = time.monotonic()\n"
            f"found = probe({{name: Target(*place) for name, place in {targets!r}.items()}}, {seconds})\n"
            "print(json.dumps([found, time.monotonic() - began]))"
        )
        return json.loads(self._lab.run(source, [sys.executable, "-P", "-c", code]).stdout)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._ends.close()


def test_the_loopback_is_there_and_comes_last():
    assert addresses()[-1] == LOOPBACK


def test_a_host_has_the_addresses_that_ip_tells_of(lab):
    told = json.loads(lab.run("node1", ["ip", "-j", "-4", "addr", "show", "up"]).stdout)
    known = {(link["ifname"], info["local"], info["prefixlen"]) for link in told for info in link["addr_info"]}
    eth0, lo = ast.literal_eval(ask(lab, "node1", "[(i.name, i.address, i.netmask) for i in addresses()]"))
    assert eth0 == ("eth0", lab.address("node1"), "255.255.255.0")
    assert {(*eth0[:2], 24), (*lo[:2], 8)} == known


def change(lab, name, *words):
    lab.run(name, ["ip", *words])


def test_an_interface_counts_once_it_is_up(lab_of_two):
    change(lab_of_two, "node1", "link", "add", "spare", "type", "bridge")
    change(lab_of_two, "node1", "addr", "add", "192.168.77.1/24", "dev", "spare")
    names = "[interface.name for interface in addresses()]"
    assert ask(lab_of_two, "node1", names) == "['eth0', 'lo']"
    change(lab_of_two, "node1", "link", "set", "spare", "up")
    assert ask(lab_of_two, "node1", names) == "['eth0', 'spare', 'lo']"


def test_every_address_of_an_interface_counts(lab_of_two):
    for number in range(1, 101):  # more than fit into the first answer of the kernel
        change(lab_of_two, "node1", "addr", "add", f"192.168.{number}.1/20", "dev", "eth0")
    found = ast.literal_eval(ask(lab_of_two, "node1", "[(i.name, i.address, i.netmask) for i in addresses()]"))
    assert found[0] == ("eth0", lab_of_two.address("node1"), "255.255.255.0")
    assert set(found[1:-1]) == {("eth0", f"192.168.{number}.1", "255.255.240.0") for number in range(1, 101)}
    assert found[-1] == ("lo", "127.0.0.1", "255.0.0.0")


def test_the_way_to_another_host_is_the_interface_between_them(lab):
    way = ask(lab, "node1", f"route_to({lab.address('node2')!r})")
    assert way == repr(Interface("eth0", lab.address("node1"), "255.255.255.0"))


def test_the_way_is_found_where_it_starts_at_a_second_address(lab_of_two):
    change(lab_of_two, "node1", "addr", "add", "192.168.77.1/24", "dev", "eth0")
    way = ask(lab_of_two, "node1", "route_to('192.168.77.2')")
    assert way == repr(Interface("eth0", "192.168.77.1", "255.255.255.0"))


def test_the_way_to_this_host_itself_is_the_loopback():
    assert route_to("127.0.0.1") == LOOPBACK


def test_there_is_no_way_where_the_kernel_has_none(lab):
    assert ask(lab, "node1", "route_to('192.0.2.1')") == "None"


def test_an_interface_is_found_by_its_name():
    assert interface_named("lo") == LOOPBACK


def test_an_unknown_interface_is_an_error_that_lists_those_that_exist():
    with pytest.raises(UsageError, match=r"^there is no network interface eth77 on .+; there are .*lo \(127.0.0.1\)$"):
        interface_named("eth77")


def test_hosts_reach_each_other(lab):
    with Bells(lab, lab.names) as bells:
        for name in lab.names:
            found, _ = bells.tried_from(name)
            assert found == dict.fromkeys(set(lab.names) - {name})


def test_only_the_pair_that_was_separated_is_cut_off(lab_of_three):
    with Bells(lab_of_three, lab_of_three.names) as bells:
        lab_of_three.separate("node1", "node2")
        cut = f"no answer in {SOON:.0f} s"
        assert bells.tried_from("node1", SOON)[0] == {"node2": cut, "node3": None}
        assert bells.tried_from("node2", SOON)[0] == {"node1": cut, "node3": None}
        assert bells.tried_from("node3")[0] == {"node1": None, "node2": None}
        lab_of_three.heal("node1")
        assert bells.tried_from("node1")[0] == {"node2": None, "node3": None}


@pytest.fixture
def lab_of_three(tmp_path):
    with hosts(tmp_path, 3, servers=False) as own:
        yield own


def test_a_host_whose_cable_was_pulled_is_known_within_5_seconds(lab_of_two):
    with Bells(lab_of_two, ["node2"]) as bells:
        lab_of_two.partition("node2")
        found, took = bells.tried_from("node1", 3.0)
    assert found["node2"] in {"no answer in 3 s", "there is no route to it"}  # neighbours are given up on after 3 s too
    assert took < 5


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("unreachable", "there is no route to it"),
        ("blackhole", "this host's own routes drop what goes there"),
        ("prohibit", "this host's own routes forbid it"),
    ],
)
def test_a_route_that_leads_nowhere_is_told_in_words(lab_of_two, kind, reason):
    change(lab_of_two, "node1", "route", "add", kind, f"{lab_of_two.address('node2')}/32")
    with Bells(lab_of_two, ["node2"]) as bells:
        assert bells.tried_from("node1")[0] == {"node2": reason}


def test_a_network_without_a_route_is_told_in_words(lab):
    found = ask(lab, "node1", f"probe({{'far': Target('192.0.2.1', 9, 'x')}}, {PATIENCE})")
    assert ast.literal_eval(found) == {"far": "its network cannot be reached"}


def test_a_closed_port_refuses():
    with socket.socket() as kept:
        kept.bind(("127.0.0.1", 0))  # kept from others, but nobody listens
        found = probe({"a": Target("127.0.0.1", kept.getsockname()[1], "x")}, PATIENCE)
    assert found == {"a": "refuses: a firewall, or nothing listens there"}


def place_of(bell):
    return Target("127.0.0.1", bell.port, bell.nonce)


def test_a_doorbell_is_known_by_its_word():
    with Doorbell("127.0.0.1") as bell:
        assert probe({"a": place_of(bell)}, PATIENCE, bell) == {"a": None}


def test_the_doorbell_of_another_run_is_somebody_else():
    with Doorbell("127.0.0.1") as bell:
        theirs = Target("127.0.0.1", bell.port, "0" * len(bell.nonce))
        assert probe({"a": theirs, "b": place_of(bell)}, PATIENCE, bell) == {
            "a": "somebody else answers there",
            "b": None,
        }


def test_two_doorbells_have_different_words():
    with Doorbell("127.0.0.1") as one, Doorbell("127.0.0.1") as other:
        assert one.nonce != other.nonce


class Stranger(Doorbell):
    """Another service, which says something of its own."""

    says = b""

    def serve_ready(self):
        visitor, _ = self._socket.accept()
        with visitor:
            visitor.sendall(self.says)


@pytest.mark.parametrize("says", [b"", b"SSH-2.0-OpenSSH_9.2\r\n", b"\xff\xfe" * 40])
def test_another_service_is_somebody_else(says):
    with Stranger("127.0.0.1") as stranger:
        stranger.says = says
        assert probe({"a": place_of(stranger)}, PATIENCE, stranger) == {"a": "somebody else answers there"}


def test_a_service_that_says_nothing_has_not_answered():
    with Doorbell("127.0.0.1") as silent:  # nobody serves it
        assert probe({"a": place_of(silent)}, SOON) == {"a": f"no answer in {SOON:.0f} s"}


def test_those_that_are_silent_are_waited_for_all_at_once():
    with ExitStack() as stack:
        silent = {str(number): stack.enter_context(Doorbell("127.0.0.1")) for number in range(20)}
        ready = stack.enter_context(Doorbell("127.0.0.1"))
        targets = {name: place_of(bell) for name, bell in (silent | {"ready": ready}).items()}
        began = time.monotonic()
        found = probe(targets, SOON, ready)
        assert time.monotonic() - began < 5  # and not 20
    assert found == dict.fromkeys(silent, f"no answer in {SOON:.0f} s") | {"ready": None}


def test_nothing_stays_open_after_a_probe():
    with Doorbell("127.0.0.1") as bell, Doorbell("127.0.0.1") as silent:
        before = descriptors()
        probe({"a": place_of(bell), "b": place_of(silent), "c": Target("127.0.0.1", 0, "x")}, SOON, bell)
        assert descriptors() == before


def descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def test_without_targets_there_is_nothing_to_wait_for():
    assert probe({}, PATIENCE) == {}
