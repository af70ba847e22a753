"""Hosts that do not fit together are told so in one line, decided without any host."""

from __future__ import annotations

from dataclasses import replace

import pytest

from samestep.launch.facts import Facts
from samestep.launch.preflight import objection

GOOD = Facts(
    name="a", host="a", pid=1, index=None, addresses=("10.0.0.1",), python="3.11.7", torch="2.13.0+cpu",
    samestep="0.1.0", gpus=0, cpus=(0, 1), cores=2, unbound=2, digest="d" * 64, directory="/work",
)  # fmt: skip


def judged(*changes, reached=None, slots=None):
    facts = [replace(GOOD, name=name, **change) for name, change in zip("abcdef", changes, strict=False)]
    return objection(facts, reached or {}, "train.py", slots or {})


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


def test_too_many_ranks_for_a_host():
    assert "host b has 2 slots and 3 ranks are asked for" in judged({}, {}, slots={"a": (3, 4), "b": (3, 2)})
