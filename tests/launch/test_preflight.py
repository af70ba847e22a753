"""Hosts that do not fit together are told so in one line, decided without any host."""

from __future__ import annotations

from dataclasses import replace

import pytest

from samestep.launch.hosts.host_info import HostInfo
from samestep.launch.hosts.preflight import binding_warnings, mismatch, threads_of

GOOD = HostInfo(
    name="a", host="a", python="3.11.7", torch="2.13.0+cpu",
    samestep="0.1.0", gpus=0, cpus=(0, 1), cores=2, unbound=2, digest="d" * 64, directory="/work",
)  # fmt: skip


def judged(*changes, reached=None, slots=None, **more):
    facts = [replace(GOOD, name=name, **change) for name, change in zip("abcdef", changes, strict=False)]
    return mismatch(facts, reached or {}, "train.py", slots or {}, **more)


@pytest.mark.parametrize(("machine", "threads"), [("one boot", 1), ("another", 2)])
def test_cores_are_shared_by_agents_of_one_machine_and_not_by_machines_of_one_name(machine, threads):
    facts = [replace(GOOD, host="localhost", machine=one) for one in ("one boot", machine)]
    assert threads_of(facts[0], 1, facts) == threads


@pytest.mark.parametrize(("machine", "warnings"), [("one boot", 1), ("another", 2)])
def test_each_machine_that_binds_too_closely_is_told_of_once(machine, warnings):
    facts = [replace(GOOD, host="localhost", cpus=(0,), cores=1, machine=one) for one in ("one boot", machine)]
    assert len(binding_warnings(facts, None)) == warnings


def test_hosts_that_fit_are_not_objected_to():
    assert judged({}, {"torch": "2.13.0+cu130"}, {"python": "3.11.2"}, slots={"a": (2, 2)}) is None


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"torch": "2.11.0"}, "different versions of torch: a 2.13.0, b 2.11.0; install the same everywhere"),
        ({"torch": None}, "different versions of torch: a 2.13.0, b no torch"),
        ({"samestep": "0.2.0"}, "different versions of samestep: a 0.1.0, b 0.2.0"),
        ({"python": "3.12.1"}, "different versions of python: a 3.11, b 3.12"),
        ({"digest": "e" * 64}, "train.py is not the same on all hosts (sha256 a dddddddd, b eeeeeeee)"),
        ({"digest": None}, "there is no train.py in /work on host b"),
    ],
)
def test_what_differs_is_said_with_both_sides(change, told):
    assert told in judged({}, change)


def test_of_several_hosts_the_odd_one_is_named():
    assert "torch: c 2.11.0, the others 2.13.0" in judged({}, {}, {"torch": "2.11.0"}, {})


def test_a_pair_that_cannot_connect_comes_before_everything_else():
    reached = {"a": {"b": "no answer in 3 s"}, "b": {"a": None}}
    told = judged({}, {"torch": "2.11.0"}, reached=reached)
    assert told.startswith("host a cannot reach host b (no answer in 3 s): open all ports between them")


def test_all_pairs_that_cannot_connect_are_named():
    reached = {"a": {"b": None, "c": "refuses"}, "b": {"c": "no answer in 3 s"}, "c": {"a": None, "b": "refuses"}}
    told = judged({}, {}, {}, reached=reached)
    assert told.startswith("host a cannot reach host c (refuses); nor do these reach each other: b - c: open all ports")
    many = {name: {"a": "refuses"} for name in "bcdefghijkl"}
    assert "d - a" not in judged({}, {}, reached=many)
    assert judged({}, {}, reached=many).count(" - ") == 8
    assert ", and 2 more: open" in judged({}, {}, reached=many)


def test_too_many_ranks_for_a_host():
    assert "host b has 2 slots and 3 ranks are asked for" in judged({}, {}, slots={"a": (3, 4), "b": (3, 2)})


def test_one_slot_is_one_slot():
    assert "host a has 1 slot and 2 ranks are asked for" in judged({}, slots={"a": (2, 1)})


def test_a_script_that_is_only_where_the_command_was_given_is_missed():
    gone = {"digest": None}
    assert judged(gone, gone) is None  # nor is it here: a command's own business
    assert "there is no train.py in /work on host a: copy it there" in judged(gone, gone, own="d" * 64)
    assert "there is no train.py in /work on host a: copy it there" in judged(gone, own="d" * 64)


@pytest.mark.parametrize(("hosts", "there"), [(1, "a"), (2, "the hosts")])
def test_a_script_that_differs_where_the_command_was_given_is_told(hosts, there):
    changes = [{}] * hosts
    assert judged(*changes, own="d" * 64) is None
    told = judged(*changes, own="e" * 64)
    assert f"train.py is not the same on all hosts (sha256 here eeeeeeee, {there} dddddddd)" in told


def test_a_network_that_others_cannot_reach_is_named_with_its_address():
    reached = {"a": {"b": "refuses: a firewall, or nothing listens there"}, "b": {"a": "no answer in 3 s"}}
    lo = {"interfaces": (("eth0", "10.0.0.1"), ("lo", "127.0.0.1"))}
    told = judged(lo, lo, reached=reached, interface="lo")
    assert told.startswith("host a cannot reach host b on its lo, 127.0.0.1 (refuses: a firewall")
    assert told.endswith("; nor the other way round: name another network with --interface, or leave it out")
