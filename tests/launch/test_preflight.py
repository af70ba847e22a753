"""Whether hosts fit together, judged from what they tell; and from what hosts with networks of their own have found."""

from __future__ import annotations

import pytest
from namespaces import hosts
from test_network import Bells

from samestep.launch.facts import Facts
from samestep.launch.preflight import objection

NAMES = ("a", "b", "c")
ALL_REACHED = {name: dict.fromkeys(set(NAMES) - {name}) for name in NAMES}


def facts(name, **options):
    usual = {
        "host": name,
        "pid": 1,
        "index": None,
        "addresses": ("10.0.0.1",),
        "python": "3.11.2",
        "torch": "2.13.0+cpu",
        "samestep": "0.1.0",
        "gpus": 0,
        "cpus": (0, 1),
        "cores": 2,
        "unbound": 2,
        "digest": "0123456789" * 6,
        "directory": "/work",
    }
    return Facts(name=name, **usual | options)


def objected(reached=ALL_REACHED, slots=None, names=NAMES, **odd):
    """Returns the objection to hosts that are alike but for what is said of some."""
    return objection([facts(name, **odd.get(name, {})) for name in names], reached, "train.py", slots or {})


def test_hosts_that_are_alike_and_reach_each_other_are_right():
    assert objected() is None


def test_one_host_is_right():
    assert objected({}, names=("a",)) is None


def test_a_pair_cut_one_way_is_named_with_the_reason():
    assert objected(ALL_REACHED | {"b": {"a": None, "c": "no answer in 3 s"}}) == (
        "host b cannot reach host c (no answer in 3 s): open all ports between them, "
        "or name the network that joins them with --interface"
    )


def test_a_pair_cut_both_ways_is_told_once():
    cut = ALL_REACHED | {"b": {"a": None, "c": "there is no route to it"}, "c": {"a": None, "b": "no answer in 3 s"}}
    told = objected(cut)
    assert told.startswith("host b cannot reach host c (there is no route to it); nor the other way round: ")


@pytest.mark.parametrize(
    ("odd", "told"),
    [
        ({"samestep": "0.2.0"}, "samestep: b 0.2.0, the others 0.1.0"),
        ({"torch": "2.12.1+cpu"}, "torch: b 2.12.1, the others 2.13.0"),
        ({"torch": None}, "torch: b no torch, the others 2.13.0"),
        ({"python": "3.12.2"}, "python: b 3.12, the others 3.11"),
    ],
)
def test_the_one_host_with_another_version_is_named(odd, told):
    assert objected(b=odd) == f"the hosts have different versions of {told}; install the same everywhere"


def test_the_first_host_is_not_right_because_it_is_first():
    assert "samestep: a 0.2.0, the others 0.1.0" in objected(a={"samestep": "0.2.0"})


def test_two_hosts_with_different_versions_are_both_named():
    told = objected(names=("a", "b"), b={"torch": "2.12.1"})
    assert "different versions of torch: a 2.13.0, b 2.12.1;" in told


@pytest.mark.parametrize("odd", [{"torch": "2.13.0+cu130"}, {"python": "3.11.9"}])
def test_another_build_or_patch_of_the_same_version_is_right(odd):
    assert objected(b=odd) is None


def test_a_script_that_differs_is_named_with_where():
    assert objected(c={"digest": "f" * 60}) == (
        "train.py is not the same on all hosts (sha256 c ffffffff, the others 01234567): "
        "copy one version to all, or share it"
    )


def test_a_script_that_is_missing_is_named_with_its_folder():
    told = objected(c={"digest": None, "directory": "/home/me"})
    assert told == "there is no train.py in /home/me on host c: copy it there, or share it"


def test_too_few_slots_are_told_with_both_numbers():
    assert objected(slots={"a": (2, 2), "b": (3, 2)}) == (
        "host b has 2 slots and 3 ranks are asked for: lower -n, or raise its slots"
    )


def test_what_hides_the_most_is_told_first():
    """A host that cannot be reached, then versions, then the script, then room."""
    wrong = {"slots": {"a": (2, 1)}, "b": {"samestep": "0.2.0", "digest": None}}
    assert "cannot reach" in objected(ALL_REACHED | {"a": {"b": "no answer in 3 s", "c": None}}, **wrong)
    assert "different versions" in objected(**wrong)
    del wrong["b"]["samestep"]
    assert "there is no train.py" in objected(**wrong)
    del wrong["b"]
    assert "slots" in objected(**wrong)


def test_every_objection_is_one_line():
    everything = [
        objected(ALL_REACHED | {"a": {"b": "no answer in 3 s"}}),
        objected(b={"python": "3.12.0"}),
        objected(b={"digest": None}),
        objected(b={"digest": "f" * 60}),
        objected(slots={"a": (2, 1)}),
    ]
    assert all(told and "\n" not in told for told in everything)


@pytest.fixture
def lab(tmp_path):
    with hosts(tmp_path, 3, servers=False) as built:
        yield built


def test_a_pair_that_was_separated_is_named_by_what_the_hosts_found(lab):
    lab.separate("node2", "node3")
    with Bells(lab, lab.names) as bells:
        reached = {name: bells.tried_from(name, 1.0)[0] for name in lab.names}
    told = objection([facts(name) for name in lab.names], reached, "train.py", {})
    assert told.startswith("host node2 cannot reach host node3 (no answer in 1 s); nor the other way round: ")
