"""What a host says of its own network, and whether it finds another."""

from __future__ import annotations

import json
import socket
import threading
from contextlib import closing
from dataclasses import asdict

import pytest

from samestep.errors import UsageError
from samestep.launch.hosts.host_info import HostInfo, digest, inspect_host
from samestep.launch.hosts.network import ProbeServer, ProbeTarget, addresses, interface_named, probe, route_to
from samestep.schema import from_json

HERE = "127.0.0.1"


def test_the_loopback_is_known_and_comes_last():
    assert addresses()[-1].is_loopback
    assert interface_named(addresses()[-1].name).address == HERE
    assert route_to(HERE).is_loopback


def test_an_interface_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(UsageError, match=r"there is no network interface eth99 on .*; there are .*lo \(127.0.0.1\)"):
        interface_named("eth99")


def served(bell, done):
    while not done.is_set():
        bell.serve_ready()


def test_a_probe_tells_the_right_host_from_another_service_and_from_none():
    with (
        closing(ProbeServer(HERE)) as bell,
        closing(ProbeServer(HERE)) as other,
        socket.create_server((HERE, 0)) as gone,
    ):
        nobody = gone.getsockname()[1]
        gone.close()
        done = threading.Event()
        threads = [threading.Thread(target=served, args=(one, done)) for one in (bell, other)]
        for thread in threads:
            thread.start()
        targets = {
            "right": ProbeTarget(HERE, bell.port, bell.nonce),
            "wrong": ProbeTarget(HERE, other.port, bell.nonce),
            "none": ProbeTarget(HERE, nobody, bell.nonce),
        }
        reached = probe(targets, 10.0)
        done.set()
        for thread in threads:
            thread.join()
    assert reached == {
        "right": None,
        "wrong": "somebody else answers there",
        "none": "refuses: a firewall, or nothing listens there",
    }


def test_a_host_that_says_nothing_is_given_up():
    with socket.create_server((HERE, 0)) as silent:
        assert probe({"b": ProbeTarget(HERE, silent.getsockname()[1], "x")}, 0.2) == {"b": "no answer in 0 s"}


def test_two_hosts_that_probe_each_other_answer_meanwhile():
    bells = ProbeServer(HERE), ProbeServer(HERE)
    found = {}

    def try_other(own, other):
        found[own.port] = probe({"other": ProbeTarget(HERE, other.port, other.nonce)}, 10.0, own)

    threads = [threading.Thread(target=try_other, args=pair) for pair in (bells, bells[::-1])]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        for bell in bells:
            bell.serve_ready()
    for thread in threads:
        thread.join()
    assert list(found.values()) == [{"other": None}] * 2
    for bell in bells:
        bell.close()


def test_facts_travel_with_the_names_of_networks():
    facts = inspect_host(__file__, is_module=False)
    told = from_json(HostInfo, json.loads(json.dumps(asdict(facts))))
    assert told == facts
    assert told.address_on(addresses()[-1].name) == HERE
    assert told.address_on("eth99") is None


def test_the_digest_of_a_module_is_that_of_the_one_in_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("raise AssertionError('imported')")
    (tmp_path / "package" / "train.py").write_text("pass")
    monkeypatch.chdir(tmp_path)
    assert digest("package.train", is_module=True) == digest("package/train.py", is_module=False) is not None
    assert digest("package.other", is_module=True) is None
