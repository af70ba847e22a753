"""Host lists and host files, and what is said about wrong ones."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.errors import UsageError
from samestep.launch.hosts.hostlist import MOST_HOSTS, HostSlots, parse_hostfile, parse_hosts


def names(text):
    return [host.name for host in parse_hosts(text)]


def complaint(read, *arguments):
    with pytest.raises(UsageError) as caught:
        read(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a", ["a"]),
        (" a , b ", ["a", "b"]),
        ("a,b[3-5],c[01-03]x", ["a", "b3", "b4", "b5", "c01x", "c02x", "c03x"]),
        ("n[1,3-4,7]", ["n1", "n3", "n4", "n7"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[0-1,00-01]", ["n0", "n1", "n00", "n01"]),
        ("rack[1-2]n[08-09]", ["rack1n08", "rack1n09", "rack2n08", "rack2n09"]),
        ("10.0.0.[9-10]", ["10.0.0.9", "10.0.0.10"]),
        ("gpu-[1-2].cluster.example", ["gpu-1.cluster.example", "gpu-2.cluster.example"]),
        ("me@n[1-2],d", ["me@n1", "me@n2", "d"]),
    ],
)
def test_a_list_is_expanded_in_its_order(text, expected):
    assert names(text) == expected


def test_slots_hold_for_every_host_of_their_item():
    assert parse_hosts("a[1-2]:4,b,me@d:1") == [
        HostSlots("a1", 4),
        HostSlots("a2", 4),
        HostSlots("b", None),
        HostSlots("me@d", 1),
    ]
    assert parse_hosts("me@d:1")[0].machine == "d"


@pytest.mark.parametrize(
    ("text", "item", "reason"),
    [
        ("a,,b", 2, "missing"),
        ("a,b,", 3, "missing"),
        ("me@", 1, "missing"),
        ("a,b[1-", 2, "never closed"),
        ("a]", 1, "closes none"),
        ("a[1-[2]]", 1, "bracket within a bracket"),
        ("a[]", 1, "no number"),
        ("a[1,,2]", 1, "no number"),
        ("a[1,x-2]", 1, "'x-2' is no number"),
        ("a[1-9/2]", 1, "no range"),
        ("a[1,9-3]", 1, "write 3-9"),
        ("a[1-03]", 1, "write 01-03"),
        ("a:0", 1, "1 or more"),
        ("a:many", 1, "whole number"),
        ("a,b c", 2, "' ' cannot stand"),
        ("a;reboot", 1, "';' cannot stand"),
        ("a,$(reboot)", 2, "'$' cannot stand"),
        ("-oProxyCommand", 1, "cannot begin with '-'"),
        ("-l@a", 1, "no user"),
        ("a b@c", 1, "no user"),
        ("a,[::1]", 2, "IPv6"),
        ("fe80::1", 1, "IPv6"),
        ("a,b[1-2],b2", 3, "'b2' is named twice"),
        ("a,me@A", 2, "'A' is named twice"),
        ("a[1-70000]", 1, "more than 65536"),
    ],
)
def test_a_wrong_list_is_refused_with_the_item(text, item, reason):
    said = complaint(parse_hosts, text)
    assert f"{text!r}, item {item}: " in said
    assert reason in said


def test_an_empty_list_is_refused():
    assert "empty" in complaint(parse_hosts, " ")


@pytest.mark.parametrize(
    "text",
    ["a[1-1000000000]", "a[1-300][1-300]", "a[1-999999999999999999]", "a[1-60000],b[1-60000]", f"a[1-{'9' * 5000}]"],
)
def test_an_absurd_range_is_counted_and_not_expanded(text):
    limited = f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({256 << 20},) * 2)\n"
    code = limited + "from samestep.launch.hosts.hostlist import parse_hosts; import sys; parse_hosts(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", code, text], capture_output=True, text=True, check=False, timeout=60)
    assert done.stderr.splitlines()[-1].endswith("more than 65536 hosts in all; look for a digit too many")
    assert len(done.stderr.splitlines()[-1]) < 200


def test_the_largest_cluster_is_taken():
    assert len(parse_hosts(f"n[1-{MOST_HOSTS}]")) == MOST_HOSTS


def test_a_host_file_has_one_item_a_line():
    text = "# the old rack\nnode1\nnode2 slots=4\r\n\n  node3:2   # MPICH's way\nnode[08-09] slots = 1\nme@login\n"
    assert parse_hostfile(text, "hosts") == [
        HostSlots("node1", None),
        HostSlots("node2", 4),
        HostSlots("node3", 2),
        HostSlots("node08", 1),
        HostSlots("node09", 1),
        HostSlots("me@login", None),
    ]


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("a\nb\na\n", 3, "'a' is named twice"),
        ("a\n\nb[1-\n", 3, "never closed"),
        ("a slots=none", 1, "whole number"),
        ("a slots=0", 1, "1 or more"),
        ("a 4", 1, "write `a slots=4`"),
        ("a max_slots=4", 1, "write `a slots=4`"),
        ("a slots=2 max_slots=4", 1, "not understood"),
        ("a:2 slots=2", 1, "twice"),
        ("#\na,b", 2, "one host, or one bracket range, a line"),
        ("a[1-40000]\nb[1-40000]", 2, "more than 65536"),
    ],
)
def test_a_wrong_host_file_is_refused_with_the_line(text, line, reason):
    said = complaint(parse_hostfile, text, "cluster/hosts")
    assert said.startswith(f"cluster/hosts:{line}: ")
    assert reason in said


def test_a_host_file_without_hosts_is_refused():
    assert complaint(parse_hostfile, "# nobody\n\n", "hosts").startswith("hosts names no host")


GROUP = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 6), st.integers(1, 4)), min_size=1, max_size=3).map(
    lambda parts: "[" + ",".join(f"{low:0{width}d}-{low + more:0{width}d}" for low, more, width in parts) + "]"
)


@pytest.fixture(scope="module")
def cluset():
    """ClusterShell's own expansion, by its program."""
    program = Path(sys.executable).parent / "cluset"
    path = str(program) if program.exists() else shutil.which("cluset")
    if path is None:
        pytest.skip("ClusterShell is not installed (pip install ClusterShell)")
    return lambda text: subprocess.run([path, "-e", text], capture_output=True, text=True, check=True).stdout.split()


def test_names_are_those_of_clustershell(cluset):
    text = "a,b[3-9],c[01-03]x,rack[1-2]n[08-12],n[098-101],10.0.0.[9-10],m[1,3-4,7]"
    assert sorted(names(text)) == sorted(cluset(text))


@given(first=GROUP, last=GROUP)
def test_brackets_multiply(first, last):
    def plain(group):
        for part in group[1:-1].split(","):
            low, high = part.split("-")
            yield from (str(number).zfill(len(low)) for number in range(int(low), int(high) + 1))

    expected = [f"r{a}n{b}" for a in plain(first) for b in plain(last)]
    if len(set(expected)) < len(expected):
        assert "named twice" in complaint(parse_hosts, f"r{first}n{last}")
    else:
        assert names(f"r{first}n{last}") == expected
