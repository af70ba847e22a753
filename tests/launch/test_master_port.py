"""A port that is bound and kept, and the store behind it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from samestep.launch.rank.store import listen_on_loopback

SERVE = """
import sys
from samestep.launch.rank.store import listen_on_loopback, serve_store
listener = listen_on_loopback()
port = listener.getsockname()[1]
serve_store(listener, 1)
assert "torch" not in sys.modules
import torch.distributed as dist
assert dist.TCPStore("127.0.0.1", port, 1, is_master=False).add("x", 2) == 2
assert dist.__spec__.loader is not None and dist.__loader__ is dist.__spec__.loader
rows = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/net/{name}").readlines()[1:]]
print([row[1] for row in rows if row[3] == "0A" and int(row[1].split(":")[1], 16) == port], f":{port:04X}")
"""


def test_two_listeners_never_share_a_port():
    with listen_on_loopback() as one, listen_on_loopback() as other:
        assert one.getsockname()[1] != other.getsockname()[1]


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a network namespace")
def test_a_host_that_cannot_reach_itself_says_so_at_once(tmp_path):
    (tmp_path / "train.py").write_text("raise AssertionError('started all the same')")
    command = ["unshare", "-n", sys.executable, "-m", "samestep", "run", "-n", "2", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "127.0.0.1 cannot be reached (Network is unreachable)" in line
    assert line.endswith("ip link set lo up")


@pytest.mark.prove
def test_the_store_answers_once_torch_is_imported_and_on_the_loopback_address_alone():
    done = subprocess.run([sys.executable, "-c", SERVE], capture_output=True, text=True, check=True)
    port = done.stdout.split()[-1]
    assert done.stdout == f"['0100007F{port}'] {port}\n"
    assert Path("/proc/net/tcp").exists()


SPAWNS = """
import os
import torch, torch.distributed as dist, torch.multiprocessing as mp

def train(rank, size):
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "12355")  # which is the launcher's already
    dist.init_process_group("gloo", METHOD, rank=rank, world_size=size)
    total = torch.ones(())
    dist.all_reduce(total)
    os.write(1, f"rank {rank}: {total:.0f}\\n".encode())  # at once: the ranks share the pipe
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.start_processes(train, (2,), 2, start_method="START")
"""


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.prove)])
def test_ranks_that_a_script_spawns_meet_at_the_launchers_port(tmp_path, method):
    """As under torchrun, whose ranks' children are clients of the agent's store too."""
    started(tmp_path, SPAWNS.replace("START", method).replace("METHOD", "'env://'"))


def test_ranks_that_a_script_spawns_meet_at_a_port_of_its_own(tmp_path):
    with listen_on_loopback() as one:
        port = one.getsockname()[1]  # free again when the script starts
    started(tmp_path, SPAWNS.replace("START", "fork").replace("METHOD", f"'tcp://127.0.0.1:{port}'"))


def started(tmp_path, text):
    (tmp_path / "train.py").write_text(text)
    command = [sys.executable, "-m", "samestep", "run", "-n", "1", "--start", "spawn", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0: 2", "rank 1: 2"]
