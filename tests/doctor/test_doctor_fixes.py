"""Fixes are commands: a shell can read all of them, and each begins with a program or a word of the shell."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from samestep.doctor import environment, finding, gpus, hosts, machine, network, software, trial
from samestep.doctor.hosts import judge
from samestep.launch.cpus import Cores
from samestep.launch.hosts.network import Interface

PROGRAMS = {
    *("cat", "df", "docker", "du", "echo", "export", "findmnt", "ip", "kill", "known", "mkdir", "modprobe", "mount"),
    *("mpiexec", "mv", "nvidia-smi", "prlimit", "ps", "python", "samestep", "sinfo", "ss", "ssh", "sysctl", "taskset"),
    *("scontrol", "sh", "timedatectl", "top", "tracepath", "ulimit", "unset", "apt-get", "getent", "chmod", "ibstat"),
}
LINK = {"latency_s": 1e-4, "bytes_per_s": 1e7, "offset_s": 0.001}
ODD = {
    "hosts": ["a", "b c", "d"],
    "addresses": ["10.0.0.1", "10.0.0.2", "10.0.0.3"],
    "unknown": [[1, 2], [], []],
    "pairs": [
        {"first": 0, "second": 1, **LINK},
        {"first": 0, "second": 2, **LINK, "bytes_per_s": 1e5, "offset_s": 90.0},
        {"first": 1, "second": 2, **LINK, "latency_s": 1.0},
    ],
    "folder": "/work of mine",
}
NAMED = hosts.HostList(hosts=("a", "b"), via="pdsh", ssh_args="-p 2222 -F my_config")
CARDS = "0, H100, 100, 90, 470.1, Prohibited, GPU-a, 9.0\n1, V100, 100, 90, 470.1, Exclusive_Process, GPU-b, 7.0\n"
ROUTES = """Iface
eth0 00000000 010200C0 0003 0 0 0 00000000
eth1 00000000 010200C0 0003 0 0 0 00000000
* 0000100A 00000000 0001 0 0 0 0000FFFF
"""


def lines(folder):
    """Everything that is wrong somewhere."""
    values = {trap.name: "1" for trap in environment.RISKY_VARIABLES} | {
        "NCCL_ALGO": "a b",
        "LD_LIBRARY_PATH": f"{folder}:/b c",
    }
    values |= {"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "OMP_NUM_THREADS": "many", "CUDA_VISIBLE_DEVICES": "0,1"}
    (folder / "libnccl.so.2").touch()
    yield from environment.check(values.get, values)
    yield from judge(ODD | {"shared": {"see": [0], "get": []}})
    yield from judge(ODD | {"shared": {"see": [0, 1], "get": []}})
    yield from judge(ODD | {"shared": {"see": [0, 1, 2], "get": [1]}})
    yield from gpus.judge(gpus.read_cards(CARDS), gpus.read_users("GPU-b, 7, x, 3 MiB"))
    yield from software.with_driver((13, 0), "470.1", {"V100": "7.0"})
    yield from software.packages(
        {"tensorboard": "2.20", "setuptools": "82", "torch": "2.13+cpu", "torchvision": "1"}.get
    )
    yield from software.kernel("4.18.0")
    yield from software.overwritten_files({"nvidia-nccl-cu12": {"a"}, "nvidia-nccl-cu13": {"a"}})
    yield from network.judge_routes(network.read_routes(ROUTES))
    yield from network.judge_routes(network.read_routes(ROUTES.replace("00000000 01", "0000010A 01")))
    yield from software.conflicts((1, "torch 2.13.0 requires x; extra == 'y', which is not installed."))
    yield from software.conflicts((-1, ""))
    yield from (software.torch(told, 2, (0,)) for told in (None, "2.1", "2.13+cpu"))
    yield from (software.slurm(said, configured=True) for said in ((1, "no"), (0, "3 down")))
    yield from (
        machine.judge_cores(one, 2.0) for one in (Cores(usable=(0,), machine=4), Cores(usable=(0, 1), machine=2))
    )
    yield machine.judge_cores(Cores(usable=(0, 1), machine=2, quota=0.2), 0.0)
    yield machine.shared_memory(folder / "none")
    yield from (machine.open_files(64, hard) for hard in (64, 1 << 20))
    yield from machine.largest_file(1, 1)
    yield from trial.judge({"gloo": 2, "mpi": 2}, [], {})
    yield from machine.check_disk(Path("/proc"))
    yield from (network.own_name(name, [Interface("eth0", "10.0.0.5")]) for name in ("no-such.invalid", "localhost"))
    yield hosts._failed(NAMED, "no")


@pytest.mark.parametrize("user", [0, 1000])
def test_a_shell_can_read_what_fixes(user, tmp_path, monkeypatch):
    pytest.importorskip("mpi4py")
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(sys, "executable", "/opt/my python/bin/python")
    monkeypatch.setattr(socket, "gethostname", lambda: "container")
    wrong = [line for line in lines(tmp_path) if line.level != "ok"]
    assert len(wrong) > 50
    for line in wrong:
        assert line.effect, line
        assert line.fix, line
        assert "…" not in line.fix.partition("  # ")[0], line
        read = subprocess.run(["bash", "-n", "-c", line.fix], capture_output=True, text=True, check=False)
        assert read.returncode == 0, (line, read.stderr)
        command = line.fix.removeprefix("sudo ").replace("'/opt/my python/bin/python'", "python")
        first = re.split(r"[ =]", command, maxsplit=1)[0]
        assert Path(first).name in PROGRAMS, line


def test_what_only_root_may_do_is_asked_of_root_alone(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert finding.as_root("ip link set lo up") == "sudo ip link set lo up"
    assert "| sudo tee -a /etc/hosts" in finding.hosts_entry("10.0.0.5 a", first=False)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert "sudo" not in finding.hosts_entry("10.0.0.5 a", first=True)
