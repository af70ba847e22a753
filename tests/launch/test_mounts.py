"""What other people have mounted does not keep a run from starting, whatever it is named."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from samestep.launch.cpus import cpu_quota, cpuset_size, parse_mounts

UNIFIED = b"29 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
ODD = {
    "no source": b"40 23 0:30 / /mnt/plain rw - tmpfs  rw,size=5\n",
    "no utf-8": b"40 23 0:30 / /mnt/caf\xe9 rw - tmpfs tmpfs rw\n",
    "line breaks the kernel does not escape": b"40 23 0:30 / /mnt/a\rb\x0cc\xc2\x85d\xe2\x80\xa8e rw - tmpfs x r\n",
}


def machine(root, mounts, quota=b"150000 100000\n"):
    files = {"proc/self/cgroup": b"0::/\n", "proc/self/mountinfo": mounts, "sys/fs/cgroup/cpu.max": quota}
    for name, content in {**files, "sys/fs/cgroup/cpuset.cpus.effective": b"0-3\n"}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


@pytest.mark.parametrize("odd", ODD)
def test_limits_are_found_beside_an_odd_mount(tmp_path, odd):
    root = machine(tmp_path, ODD[odd] + UNIFIED)
    assert (cpu_quota(root), cpuset_size(root)) == (1.5, 4)


def test_an_empty_source_does_not_shift_what_follows():
    legacy = "33 24 0:29 / /sys/fs/cgroup/cpu rw - cgroup  rw,cpu\n"
    assert [mount.version for mount in parse_mounts(legacy, "cpu")] == [1]


@pytest.mark.parametrize("mounts", [b"no mounts at all\n", b"40 23 - tmpfs\n", b"\xff\x00"])
def test_no_limit_is_known_where_the_mounts_cannot_be_read(tmp_path, mounts):
    root = machine(tmp_path, mounts)
    assert (cpu_quota(root), cpuset_size(root)) == (None, None)


@pytest.mark.parametrize("quota", [b"many 100000\n", b"5 0\n", b"5 of 6\n", b"\xff\n"])
def test_no_limit_is_known_where_the_quota_cannot_be_read(tmp_path, quota):
    assert cpu_quota(machine(tmp_path, UNIFIED, quota)) is None


@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount")
def test_a_run_starts_beside_a_mount_without_a_source(folder):
    (folder.path / "mount").mkdir()
    script = folder.script("print('here')")
    run = f"mount -t tmpfs '' mount && exec '{sys.executable}' -P -m samestep run -n 2 --start spawn {script}"
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", run], cwd=folder.path, capture_output=True, text=True, timeout=120, check=False
    )
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no mount can be made here: {done.stderr.strip()}")
    assert sorted(done.stdout.splitlines()) == ["[rank 0] here", "[rank 1] here"], done.stderr
