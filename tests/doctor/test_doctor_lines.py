"""What the doctor says of what it sees: judged from texts and folders that are made up."""

from __future__ import annotations

import os
import resource
import socket
import stat
import subprocess
from pathlib import Path

import pytest

from samestep.cli import doctor as command
from samestep.doctor import disk, gpus, machine, names, software, trial, variables
from samestep.doctor.judge import judge
from samestep.doctor.line import Line, fine, kept, worst
from samestep.launch.network import Interface

ETHERNET = Interface("eth0", "10.0.0.5", "255.255.255.0")
LOOPBACK = Interface("lo", "127.0.0.1", "255.0.0.0")


def levels(lines):
    return [(line.about, line.level) for line in lines]


# --- lines -------------------------------------------------------------------------------------


def test_the_worst_line_decides():
    assert worst([]) == worst([fine("a", "b")]) == "fine"
    assert worst([Line("a", "error", "b"), Line("a", "warning", "b"), fine("a", "b")]) == "error"


def test_a_look_that_fails_is_a_line():
    def look():
        yield fine("a", "seen")
        raise ValueError("odd")

    assert [line.text for line in kept("a", look)] == ["seen", "cannot be looked at: ValueError: odd"]


def test_hosts_that_agree_are_told_once():
    lines = [Line("torch", "fine", "2.13", host=host) for host in "ab"]
    lines += [Line("disk", "warning", "full", "no room", "rm", host="b")]
    told = command.shown(lines, wrong=False, coloured=False)
    assert [" ".join(line.split()) for line in told] == [
        "fine torch all hosts: 2.13",
        "WARNING disk b: full",
        "causes: no room",
        "mend: rm",
        "",
        "training would work: 1 warning",
    ]
    assert not any("torch" in line for line in command.shown(lines, wrong=True, coloured=False))
    assert "\x1b[33;1mWARNING" in command.shown(lines, wrong=True, coloured=True)[0]


def test_long_lines_are_broken_where_the_terminal_ends():
    line = Line("disk", "warning", "full of " + "things " * 30, "no room", "rm -r " + "x" * 90)
    told = command.shown([line], wrong=False, coloured=False, width=72)
    assert all(len(text) <= 72 for text in told if "xxx" not in text)
    assert sum("things" in text for text in told) > 3


# --- software ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("installed", "gpus_here", "level"),
    [
        (None, 0, "error"),
        ("2.10.0", 0, "error"),
        ("1.13.1+cu117", 4, "error"),
        ("2.13.0+cpu", 0, "fine"),
        ("2.13.0+cpu", 2, "warning"),
        ("2.13.0+cu128", 2, "fine"),
        ("2.11.0a0+git1", 0, "fine"),
    ],
)
def test_torch_must_be_there_new_enough_and_for_the_gpus(installed, gpus_here, level):
    line = software.torch(installed, gpus_here)
    assert line.level == level
    assert bool(line.mend) == (level != "fine")


def test_packages_that_contradict_each_other_are_named():
    said = "torchvision 0.27.0 has requirement torch==2.12.0, but you have torch 2.13.0.\nblack 1 requires click."
    (line,) = software.quarrels((1, said))
    assert (line.level, line.text) == ("warning", said.splitlines()[0])
    assert [line.level for line in software.quarrels((0, "No broken requirements found."))] == ["fine"]
    assert list(software.quarrels((1, "/usr/bin/python: No module named pip"))) == []


def test_slurm_is_judged_by_its_nodes():
    assert software.slurm((0, "4 idle\n1 down*"), configured=True).text == "nodes: 4 idle, 1 down*"
    assert software.slurm((0, "2 drained\n1 down*"), configured=True).level == "warning"
    assert software.slurm((1, "sinfo: error: no controller"), configured=True).level == "warning"
    assert software.slurm((1, "no configuration"), configured=False).level == "fine"


# --- machine -----------------------------------------------------------------------------------


def test_shared_memory_must_be_there_and_large(tmp_path):
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    assert machine.shared_memory(tmp_path).level == ("fine" if free >= machine.LEAST_SHM else "warning")
    missing = machine.shared_memory(tmp_path / "no")
    assert (missing.level, missing.text) == ("warning", "cannot be used: No such file or directory")


def test_shared_memory_of_a_container_is_too_small(tmp_path, monkeypatch):
    of_docker = os.statvfs_result((4096, 4096, 16384, 16384, 16384, 0, 0, 0, 0, 255))  # 64 MiB
    monkeypatch.setattr(os, "statvfs", lambda _: of_docker)
    line = machine.shared_memory(tmp_path)
    assert (line.level, line.text) == ("warning", "67.1 MB free of 67.1 MB")
    assert "--shm-size" in line.mend


def test_open_files_are_counted():
    assert machine.open_files(1024).level == "note"
    assert machine.open_files(65536).level == machine.open_files(resource.RLIM_INFINITY).level == "fine"


def test_memory_is_that_of_the_control_group(tmp_path):
    for name, text in {
        "proc/meminfo": "MemTotal: 1000 kB\nMemFree: 10 kB\nMemAvailable: 900 kB\n",
        "proc/self/cgroup": "0::/job\n",
        "proc/self/mountinfo": "1 0 0:1 / /sys/fs/cgroup rw - cgroup2 none rw\n",
        "sys/fs/cgroup/job/memory.max": "409600\n",
        "sys/fs/cgroup/job/memory.current": "102400\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert machine.read_memory(tmp_path) == (307_200, 409_600)
    (tmp_path / "sys/fs/cgroup/job/memory.max").write_text("max\n")
    assert machine.read_memory(tmp_path) == (900 << 10, 1000 << 10)


# --- disk --------------------------------------------------------------------------------------


def test_a_disk_is_measured_and_left_as_it_was(tmp_path):
    found = levels(disk.look(tmp_path))
    assert [about for about, _ in found] == ["disk", "disk speed", "file locks"]
    assert ("file locks", "fine") in found
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written_is_an_error(tmp_path):
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    assert levels(disk.look(tmp_path)) == [("disk", "error")]


def test_a_folder_that_cannot_be_written_is_an_error():
    ((line),) = disk.look(Path("/proc"))
    assert (line.about, line.level) == ("disk", "error")
    assert "--run-dir" in line.mend


# --- names -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "level", "said"),
    [
        ("10.0.0.5", "fine", ""),
        ("127.0.1.1", "note", "connect to themselves"),
        ("10.9.9.9", "warning", "not this host"),
        (None, "warning", "leads nowhere"),
    ],
)
def test_the_hosts_own_name_must_lead_to_it(address, level, said, monkeypatch, tmp_path):
    def look_up(*_):
        if address is None:
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    line = names.own_name("node7", [ETHERNET, LOOPBACK])
    assert line.level == level
    assert said in line.text + line.effect
    if level == "fine":
        return
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.1.1 node7\n" if address else "")
    mended = line.mend.replace("/etc/hosts", str(hosts)).replace("/tmp/hosts", str(tmp_path / "draft"))
    subprocess.run(["sh", "-c", mended], check=True)
    assert hosts.read_text().splitlines() == ["10.0.0.5 node7", *(["127.0.1.1 node7"] if address else [])]


def test_a_port_that_is_taken_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        line = list(names.ports(number))[-1]
    assert (line.level, line.text) == ("note", f"{number} is taken")
    assert list(names.ports(number))[-1].level == "fine"


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
    assert levels(names.chosen([ETHERNET, LOOPBACK])) == ([] if is_there else [(name, "error")])


def test_adapters_that_are_down_are_named(tmp_path):
    for number, state in (("1", "4: ACTIVE"), ("2", "1: DOWN")):
        port = tmp_path / "mlx5_0/ports" / number
        port.mkdir(parents=True)
        (port / "state").write_text(state + "\n")
        (port / "rate").write_text("200 Gb/sec (4X HDR)\n")
    assert levels(names.adapters(tmp_path)) == [("InfiniBand mlx5_0", "fine"), ("InfiniBand mlx5_0", "warning")]


# --- variables ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "level"),
    [
        ("CUDA_LAUNCH_BLOCKING", "1", "warning"),
        ("CUDA_LAUNCH_BLOCKING", "0", None),
        ("NCCL_P2P_DISABLE", "1", "warning"),
        ("NCCL_DEBUG", "INFO", "note"),
        ("NCCL_DEBUG", "WARN", None),
        ("TORCH_DISTRIBUTED_DEBUG", "detail", "error"),
        ("TORCH_DISTRIBUTED_DEBUG", "OFF", None),
        ("OMP_NUM_THREADS", "100000", "warning"),
        ("OMP_NUM_THREADS", "all", "warning"),
        ("OMP_NUM_THREADS", "1", "note"),
        ("OMP_PROC_BIND", "false", None),
        ("OMP_PROC_BIND", "close", "warning"),
        ("CUDA_VISIBLE_DEVICES", "", "note"),
    ],
)
def test_a_variable_that_surprises_is_named(name, value, level, monkeypatch):
    monkeypatch.setattr(variables, "visible_gpus", lambda: 0)
    found = [(line.about, line.level) for line in variables.look({name: value}.get)]
    assert found == ([("variables", "fine")] if level is None else [(name, level)])


@pytest.mark.parametrize(("visible", "level"), [(2, "note"), (1, "warning"), (0, "note")])
def test_gpus_that_a_variable_hides_are_counted(visible, level, monkeypatch):
    monkeypatch.setattr(variables, "visible_gpus", lambda: visible)
    (line,) = variables.look({"CUDA_VISIBLE_DEVICES": "0,1"}.get)
    assert line.level == level


# --- GPUs: as nvidia-smi prints them; no GPU was to be had -----------------------------------------

CARDS = """\
0, NVIDIA H100 80GB HBM3, 81559, 4, 550.54.15, Default
1, NVIDIA H100 80GB HBM3, 81559, 70123, 550.54.15, Default
2, NVIDIA A100-SXM4-40GB, 40960, 4, 550.54.15, Prohibited
"""
JOINED = """\
\tGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV18\tPXB\t0-47\t0
GPU1\tNV18\t X \tSYS\t0-47\t0
NIC0\tPXB\tSYS\t X
"""


def test_gpus_in_use_closed_or_unlike_are_named():
    lines = list(gpus.judge(gpus.read_cards(CARDS), ["4242, python, 70000 MiB"]))
    assert levels(lines) == [("GPUs", "note"), ("GPUs", "warning"), ("GPUs", "error")]
    assert lines[0].text == "1 x NVIDIA A100-SXM4-40GB, 2 x NVIDIA H100 80GB HBM3, driver 550.54.15"
    assert lines[1].text == "GPU 1 holds 73.5 GB already; 4242, python, 70000 MiB"
    assert lines[1].mend == "export CUDA_VISIBLE_DEVICES=0,2"
    alike = list(gpus.judge(gpus.read_cards(CARDS.splitlines()[0]), []))
    assert levels(alike) == [("GPUs", "fine")]


def test_how_gpus_are_joined_is_told():
    (line,) = gpus.topology(JOINED, 2)
    assert line.text == "NVLink (NV18: nvidia-smi topo -m)"
    (line,) = gpus.topology(JOINED.replace("NV18", "SYS"), 2)
    assert line.text.startswith("some only across sockets")


# --- the trial ---------------------------------------------------------------------------------

RIGHT = {"right": True, "seconds": 0.002, "ranks": 2, "cuda": None, "nccl": None}


def test_backends_without_a_step_are_errors():
    steps = [{"backend": "gloo", **RIGHT}]
    lines = list(trial.judge(["gloo", "samestep", "nccl"], steps, "rank 1: RuntimeError: no"))
    assert [line.level for line in lines] == ["fine", "error", "error"]
    assert [line.text for line in lines] == [
        "2 ranks, right, 2.00 ms",
        "rank 1: RuntimeError: no",
        "not reached, because of samestep",
    ]


def test_a_wrong_gradient_is_an_error():
    (line,) = trial.judge(["gloo"], [{"backend": "gloo", **RIGHT, "right": False}], "")
    assert (line.level, line.effect) == ("error", "replicas part, and nothing says so")


def test_what_a_trial_wrote_is_read_up_to_a_torn_line(tmp_path):
    (tmp_path / "steps").write_text('{"backend": "gloo"}\n{"backe')
    assert trial.read_steps(tmp_path / "steps") == [{"backend": "gloo"}]
    assert trial.read_steps(tmp_path / "none") == []


# --- between hosts -------------------------------------------------------------------------------


def found(**changes):
    """Three hosts, alike, with a folder that all see."""
    pairs = [(0, 1), (0, 2), (1, 2)]
    usual = {"latency_s": 1e-4, "bytes_per_s": 1e9, "ahead_s": 0.001}
    known = [{"first": a, "second": b, **usual} for a, b in pairs]
    shared = {"see": [0, 1, 2], "get": []}
    return {"hosts": ["a", "b", "c"], "pairs": known, "shared": shared, "folder": "/work"} | changes


def test_hosts_alike_are_fine():
    lines = list(judge(found()))
    assert levels(lines) == [(about, "fine") for about in ("links", "from a", "from b", "clocks", "shared folder")]
    assert [line.text for line in lines][1:3] == ["b 0.10 ms, 1.0 GB/s; c 0.10 ms, 1.0 GB/s", "c 0.10 ms, 1.0 GB/s"]


def test_a_slow_link_a_wrong_clock_and_a_folder_of_ones_own_are_named():
    odd = found(shared={"see": [0, 1], "get": []})
    odd["pairs"][1] |= {"bytes_per_s": 1e8, "ahead_s": -30.0}
    odd["pairs"][2] |= {"latency_s": 0.02}
    lines = {line.about: line for line in judge(odd)}
    texts = [line.text for line in judge(odd) if line.about == "link"]
    assert texts == ["a - c: 0.10 ms, 100.0 MB/s", "b - c: 20.0 ms, 1.0 GB/s"]
    assert lines["clock"].text == "that of c is 30.0 s behind that of a"
    assert (lines["shared folder"].level, lines["shared folder"].text) == ("warning", "/work is not seen by c")


def test_locks_that_do_not_hold_are_named():
    (line,) = [one for one in judge(found(shared={"see": [0, 1, 2], "get": [2]})) if one.about == "shared folder"]
    assert line.text == "locks in /work do not keep out c"
    (line,) = [one for one in judge(found(shared={"see": [0], "get": []})) if one.about == "shared folder"]
    assert (line.level, line.text) == ("note", "/work is each host's own")
