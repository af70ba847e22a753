"""What the doctor says of cores, memory, limits and the disk."""

from __future__ import annotations

import os
import resource
import stat
from pathlib import Path

import pytest

from samestep.doctor import machine
from samestep.launch.cpus import Cores


def levels(lines):
    return [(line.check, line.level) for line in lines]


# --- machine -----------------------------------------------------------------------------------


def test_shared_memory_must_be_there_and_large(tmp_path):
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    assert machine.shared_memory(tmp_path).level == ("ok" if free >= machine.LEAST_SHM else "warning")
    missing = machine.shared_memory(tmp_path / "no")
    assert (missing.level, missing.text) == ("warning", "cannot be used: No such file or directory")


def test_shared_memory_of_a_container_is_too_small(tmp_path, monkeypatch):
    of_docker = os.statvfs_result((4096, 4096, 16384, 16384, 16384, 0, 0, 0, 0, 255))  # 64 MiB
    monkeypatch.setattr(os, "statvfs", lambda _: of_docker)
    line = machine.shared_memory(tmp_path)
    assert (line.level, line.text) == ("warning", "67.1 MB free of 67.1 MB")
    assert "--shm-size" in line.fix


def test_open_files_are_counted():
    assert machine.open_files(1024, 524288).level == "note"
    assert machine.open_files(64, 64).level == "warning"
    assert machine.open_files(65536, 65536).level == machine.open_files(*2 * [resource.RLIM_INFINITY]).level == "ok"


@pytest.mark.parametrize(
    ("hard", "fix"),
    [
        (524288, "ulimit -n 65536"),
        (resource.RLIM_INFINITY, "ulimit -n 65536"),
        (4096, "ulimit -n 4096"),
        (1024, "prlimit --pid $$ --nofile=65536:65536"),
    ],
)
def test_files_are_raised_as_far_as_this_user_may(hard, fix):
    assert fix in machine.open_files(1024, hard).fix


def test_processes_are_those_that_the_control_group_still_allows(tmp_path):
    for name, text in {
        "proc/self/cgroup": "0::/job\n",
        "proc/self/mountinfo": "1 0 0:1 / /sys/fs/cgroup rw - cgroup2 none rw\n",
        "sys/fs/cgroup/job/pids.max": "300\n",
        "sys/fs/cgroup/job/pids.current": "260\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    line = machine.processes(tmp_path, resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    assert (line.level, line.text) == ("warning", "40 more in this control group, of 300")
    assert f"echo max > {tmp_path}/sys/fs/cgroup/job/pids.max" in line.fix
    (tmp_path / "sys/fs/cgroup/job/pids.max").write_text("max\n")
    assert machine.processes(tmp_path, *2 * [resource.RLIM_INFINITY]).text == "unlimited"


def test_a_limit_of_users_binds_users_and_not_root(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    line = machine.processes(tmp_path, 100, 100)
    assert (line.level, line.text) == ("warning", "100 of this user")
    assert line.fix.startswith("sudo prlimit --pid $$ --nproc=65536:65536")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert machine.processes(tmp_path, 100, 100).level == "ok"


def test_a_limit_of_files_is_told_where_checkpoints_can_reach_it():
    assert [*machine.largest_file(*2 * [resource.RLIM_INFINITY]), *machine.largest_file(1 << 50, 1 << 50)] == []
    (line,) = machine.largest_file(1 << 30, resource.RLIM_INFINITY)
    assert (line.level, line.text, line.fix) == ("warning", "at most 1.1 GB", "ulimit -f unlimited")
    (line,) = machine.largest_file(1 << 30, 1 << 30)
    assert "prlimit --pid $$ --fsize=unlimited:unlimited" in line.fix


@pytest.mark.parametrize(
    ("cores", "busy", "level", "said"),
    [
        (Cores(usable=(0, 1), machine=2), 0.0, "ok", "2 cores, 0.0 of them busy"),
        (Cores(usable=(0, 1), machine=2), 1.5, "warning", "wait for cores"),
        (Cores(usable=(3,), machine=8), 0.0, "warning", "taskset -cp 0-7 $$"),
        (Cores(usable=(0, 1), machine=2, quota=0.5), 0.0, "warning", "docker update --cpus=2 "),
        (Cores(usable=(0, 1), machine=2, quota=1.5), 0.0, "ok", "1.5 cores by the cgroup's quota"),
    ],
)
def test_cores_are_those_that_may_be_used_and_that_others_leave(cores, busy, level, said):
    line = machine.judge_cores(cores, busy)
    assert line.level == level
    assert said in line.text + line.effect + line.fix


def test_nodes_of_memory_are_counted(tmp_path):
    assert machine.numa(tmp_path).text.startswith("1 node")
    for node in ("node0", "node1"):
        (tmp_path / "sys/devices/system/node" / node).mkdir(parents=True)
    assert machine.numa(tmp_path).text.startswith("2 nodes: `samestep run --pin`")


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
    found = levels(machine.check_disk(tmp_path))
    assert [check for check, _ in found] == ["disk", "disk speed", "file locks"]
    assert ("file locks", "ok") in found
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write into any folder, so none is refused; /proc is, below")
def test_a_folder_that_may_not_be_written_is_an_error(tmp_path):
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    assert levels(machine.check_disk(tmp_path)) == [("disk", "error")]


def test_a_folder_that_cannot_be_written_is_an_error():
    ((line),) = machine.check_disk(Path("/proc"))
    assert (line.check, line.level) == ("disk", "error")
    assert "--run-dir" in line.fix
