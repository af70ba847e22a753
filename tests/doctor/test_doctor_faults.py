"""Faults that are provoked, and fixed by what the doctor says: its command, pasted into a shell.

Each has namespaces of its own for its mounts, network and name, so that nothing of this machine is touched.
"""

from __future__ import annotations

import os
import resource
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from samestep.rankenv import fresh_environment

LOOK = """
import sys
from samestep.doctor.{module} import check
for line in check():
    if line.level != "ok" and line.check in {check}:
        print(line.fix)
        print(line.level, line.check, line.text, file=sys.stderr)
"""


def can_unshare() -> bool:
    words = ["unshare", "-m", "-n", "-u", "true"]
    return shutil.which(words[0]) is not None and not subprocess.run(words, capture_output=True, check=False).returncode


def may_raise_limits() -> bool:
    """CAP_SYS_RESOURCE, which root lacks in some containers: capabilities(7)."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return bool(int(status.partition("CapEff:")[2].split()[0], 16) >> 24 & 1)


pytestmark = pytest.mark.skipif(not can_unshare(), reason="needs namespaces of its own: root, and unshare")

SH = "/dev/shm"
FAULTS = {
    "a small /dev/shm": ("mount -t tmpfs -o size=16m shm /dev/shm", "machine", [SH]),
    "few open files": ("ulimit -n 64", "machine", ["open files"]),
    "few open files, more allowed": ("ulimit -Sn 512", "machine", ["open files"]),
    "small files only": ("ulimit -Sf 100000", "machine", ["file size"]),
    "no large files at all": ("ulimit -f 100000", "machine", ["file size"]),
    "one core": ("taskset -cp 0 $$ > /dev/null", "machine", ["cores"]),
    "a name that does not resolve": ("ip link set lo up; hostname no-such-host-77", "network", ["own name"]),
    "no loopback": ("ip link set lo down", "network", ["loopback"]),
    "few ports": (
        "ip link set lo up; echo '40000 40100' > /proc/sys/net/ipv4/ip_local_port_range",
        "network",
        ["ports"],
    ),
    "a network that is dropped": ("ip link set lo up; ip route add blackhole 10.9.0.0/16", "network", ["routes"]),
    "an interface that is not there": ("ip link set lo up; export GLOO_SOCKET_IFNAME=eth9", "network", [
        "GLOO_SOCKET_IFNAME",
    ]),
    "DETAIL": ("export TORCH_DISTRIBUTED_DEBUG=DETAIL", "environment", ["TORCH_DISTRIBUTED_DEBUG"]),
    "half of what a launcher sets": ("export WORLD_SIZE=2", "environment", ["rank variables"]),
    "kernels one by one": ("export CUDA_LAUNCH_BLOCKING=1", "environment", ["CUDA_LAUNCH_BLOCKING"]),
    "NCCL told what to do": ("export NCCL_ALGO=Ring NCCL_PROTO=LL", "environment", ["NCCL_*"]),
}  # fmt: skip

RAISED = {"few open files", "no large files at all"}  # above what the user may have


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_and_gone_when_its_fix_is_pasted(fault, tmp_path):
    provoked, module, check = FAULTS[fault]
    if "core" in fault and len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core is all there is here, and the fault is to have one of several")
    if fault in RAISED and not may_raise_limits():
        pytest.skip("this root lacks CAP_SYS_RESOURCE, with which the fix raises a hard limit")
    (tmp_path / "look.py").write_text(LOOK.format(module=module, check=set(check)), encoding="utf-8")
    shutil.copy("/etc/hosts", tmp_path / "hosts")
    look = f"{sys.executable} look.py"
    script = f"""
        mount --bind hosts /etc/hosts
        {provoked}
        {look} > fix || exit 3
        . ./fix > pasted 2>&1 || {{ cat pasted; exit 4; }}
        {look} > again || exit 5
    """
    command = ["unshare", "-m", "-n", "-u", "bash", "-c", script]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False, env=fresh_environment()
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "fix").read_text(encoding="utf-8").strip(), "the fault was not found"
    assert (tmp_path / "again").read_text(encoding="utf-8") == "", done.stderr


def test_the_machine_itself_is_as_it_was():
    assert socket.gethostname() != "no-such-host-77"
    assert os.statvfs(SH).f_blocks * os.statvfs(SH).f_frsize != 16 << 20
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 64
    assert Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split() != ["40000", "40100"]
