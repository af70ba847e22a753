"""What the doctor says of names, interfaces, ports and routes, and of what lies between hosts."""

from __future__ import annotations

import errno
import socket
import subprocess

import pytest

from samestep.doctor import network, pairwise
from samestep.doctor.hosts import judge
from samestep.launch.hosts.network import Interface

ETHERNET = Interface("eth0", "10.0.0.5")
LOOPBACK = Interface("lo", "127.0.0.1")


def levels(lines):
    return [(line.check, line.level) for line in lines]


# --- names -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "level", "said"),
    [
        ("10.0.0.5", "ok", ""),
        ("127.0.1.1", "note", "connect to themselves"),
        ("10.9.9.9", "warning", "not this host"),
        (None, "warning", "does not resolve"),
    ],
)
def test_the_hosts_own_name_must_lead_to_it(address, level, said, monkeypatch, tmp_path):
    def look_up(*_):
        if address is None:
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    line = network.own_name("node7", [ETHERNET, LOOPBACK])
    assert line.level == level
    assert said in line.text + line.effect
    if level != "warning":
        assert "tee" not in line.fix  # a system file is not written for a note
        return
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.1.1 node7\n" if address else "")
    fixed = line.fix.replace("/etc/hosts", str(hosts)).replace("sudo ", "")
    subprocess.run(["sh", "-c", fixed], check=True)
    assert hosts.read_text().splitlines() == ["10.0.0.5 node7", *(["127.0.1.1 node7"] if address else [])]


def test_a_host_without_a_network_has_its_own_name_all_the_same(monkeypatch):
    own = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: own)
    assert network.own_name("node7", []).level == "ok"


def test_localhost_must_lead_here(monkeypatch):
    assert list(network.localhost()) == []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [(0, 0, 0, "", ("10.0.0.5", 0))])
    (line,) = network.localhost()
    assert (line.level, line.text) == ("warning", "is 10.0.0.5")


def test_interfaces_are_told_with_their_speed_and_their_largest_packet(tmp_path):
    for name, text in (("speed", "10000"), ("mtu", "9000")):
        (tmp_path / "eth0").mkdir(exist_ok=True)
        (tmp_path / "eth0" / name).write_text(text + "\n")
    text = network.interfaces([ETHERNET, LOOPBACK], tmp_path).text
    assert text == "eth0 10.0.0.5 (10000 Mbit/s, MTU 9000), lo 127.0.0.1"
    assert network.interfaces([LOOPBACK], tmp_path).level == "note"


def test_ports_that_are_all_taken_are_not_called_a_loopback_that_is_down(monkeypatch):
    def taken(*_, **__):
        raise OSError(errno.EADDRINUSE, "Address already in use")

    monkeypatch.setattr(socket, "create_server", taken)
    (line,) = network.loopback()
    assert (line.check, line.level) == ("ports", "error")
    assert "sysctl -w net.ipv4.ip_local_port_range=" in line.fix


def test_a_port_that_is_taken_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        line = list(network.ports(number))[-1]
    assert (line.level, line.text) == ("note", f"{number} is taken")
    assert list(network.ports(number))[-1].level == "ok"


@pytest.mark.parametrize(
    ("name", "value", "is_there"),
    [
        ("GLOO_SOCKET_IFNAME", "eth0", True),
        ("GLOO_SOCKET_IFNAME", "eth", False),
        ("NCCL_SOCKET_IFNAME", "eth", True),
        ("NCCL_SOCKET_IFNAME", "=eth", False),
        ("NCCL_SOCKET_IFNAME", "^docker", True),
        ("NCCL_SOCKET_IFNAME", "ib0,eth0:1", True),
        ("NCCL_SOCKET_IFNAME", "ib", False),
    ],
)
def test_variables_must_name_interfaces_that_are_there(name, value, is_there, monkeypatch):
    monkeypatch.setenv(name, value)
    assert levels(network.chosen([ETHERNET, LOOPBACK])) == ([] if is_there else [(name, "error")])


def test_adapters_that_are_down_are_named(tmp_path):
    for number, state in (("1", "4: ACTIVE"), ("2", "1: DOWN")):
        port = tmp_path / "mlx5_0/ports" / number
        port.mkdir(parents=True)
        (port / "state").write_text(state + "\n")
        (port / "rate").write_text("200 Gb/sec (4X HDR)\n")
    assert levels(network.adapters(tmp_path)) == [("InfiniBand mlx5_0", "ok"), ("InfiniBand mlx5_0", "warning")]


# --- between hosts -------------------------------------------------------------------------------


def found(**changes):
    """Three hosts, alike, with a folder that all see."""
    pairs = [(0, 1), (0, 2), (1, 2)]
    usual = {"latency_s": 1e-4, "bytes_per_s": 1e9, "offset_s": 0.001}
    known = [{"first": a, "second": b, **usual} for a, b in pairs]
    shared = {"see": [0, 1, 2], "get": []}
    addresses = ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
    whole = {"hosts": ["a", "b", "c"], "addresses": addresses, "unknown": [[], [], []], "pairs": known}
    return whole | {"shared": shared, "folder": "/work"} | changes


def test_hosts_alike_are_fine():
    lines = list(judge(found()))
    assert levels(lines) == [
        (check, "ok") for check in ("links", "from a", "from b", "names", "clocks", "shared folder")
    ]
    assert [line.text for line in lines][1:3] == ["b 0.10 ms, 1.0 GB/s; c 0.10 ms, 1.0 GB/s", "c 0.10 ms, 1.0 GB/s"]


def test_a_slow_link_a_wrong_clock_and_a_folder_of_ones_own_are_named():
    odd = found(shared={"see": [0, 1], "get": []})
    odd["pairs"][1] |= {"bytes_per_s": 1e8, "offset_s": -30.0}
    odd["pairs"][2] |= {"latency_s": 0.02}
    lines = {line.check: line for line in judge(odd)}
    texts = [line.text for line in judge(odd) if line.check == "link"]
    assert texts == ["a - c: 0.10 ms, 100.0 MB/s", "b - c: 20.0 ms, 1.0 GB/s"]
    assert lines["clock"].text == "that of c is 30.0 s behind that of a"
    assert (lines["shared folder"].level, lines["shared folder"].text) == ("warning", "/work is not seen by c")


def test_hosts_that_do_not_know_each_other_by_name_are_told():
    (line,) = [one for one in judge(found(unknown=[[1, 2], [], []])) if one.check == "names"]
    assert (line.level, line.text) == ("note", "b, c: not known on a")
    assert line.fix.startswith("getent hosts b c  # on a; ")
    assert line.fix.endswith(": b is 10.0.0.2, c is 10.0.0.3")


def test_names_are_looked_up_from_every_host(monkeypatch):
    def look_up(name, *_):
        if name == "lost":
            raise socket.gaierror(-2, "Name or service not known")
        return []

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    assert pairwise.unknown_names(["own", "known", "lost"], "own") == [2]


def test_locks_that_do_not_hold_are_named():
    (line,) = [one for one in judge(found(shared={"see": [0, 1, 2], "get": [2]})) if one.check == "shared folder"]
    assert line.text == "locks in /work do not keep out c"
    (line,) = [one for one in judge(found(shared={"see": [0], "get": []})) if one.check == "shared folder"]
    assert (line.level, line.text) == ("note", "/work is each host's own")


# --- routes --------------------------------------------------------------------------------------

HEAD = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n"
DEFAULT = "eth0\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\t0\t0\t0\n"
NETWORK = "eth0\t000200C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n"
DROPPED = "*\t0000100A\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0\n"
SECOND = DEFAULT.replace("eth0", "eth1")


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (DEFAULT + NETWORK, ["ok"]),
        (NETWORK, ["ok", "note"]),
        (DEFAULT + NETWORK + DROPPED, ["ok", "warning"]),
        (DEFAULT + NETWORK + DROPPED.replace("0001", "0201"), ["ok", "warning"]),
        (DEFAULT + SECOND, ["ok", "warning"]),
        (DEFAULT + SECOND.replace("0003\t0\t0\t0", "0003\t0\t0\t100"), ["ok"]),
        ("", []),
    ],
)
def test_routes_that_lead_nowhere_or_anywhere_are_told(rows, expected):
    assert [line.level for line in network.judge_routes(network.read_routes(HEAD + rows))] == expected


def test_routes_are_told_as_a_person_writes_them():
    (line,) = network.judge_routes(network.read_routes(HEAD + DEFAULT + NETWORK))
    assert line.text == "default by 192.0.2.1 on eth0, 192.0.2.0/24 on eth0"
    *_, line = network.judge_routes(network.read_routes(HEAD + DEFAULT + DROPPED))
    assert line.text == "what goes to 10.16.0.0/16 is dropped here"
    assert line.fix.endswith("ip route del 10.16.0.0/16")
