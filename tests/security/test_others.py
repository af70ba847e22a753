"""Other users of the host, and whoever can open a connection to it: what they are let in to, and what they can see."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from ports import free_port
from samestep.cli.hosts import forwarded_environment
from samestep.errors import RendezvousError
from samestep.launch.hosts.secure_link import connect
from samestep.paths import own_folder
from samestep.rankenv import fresh_environment

# --- who may take part ---------------------------------------------------------------------------


def by_hand(folder, number, port, **variables):
    """Starts one of two nodes of one host, as a user would at two terminals."""
    words = ["run", "--nnodes", "2", "--node-rank", str(number), "--rendezvous", f"127.0.0.1:{port}", "-n", "1"]
    words += ["--start", "fork"]
    command = [sys.executable, "-P", "-m", "samestep", *words, "train.py"]
    environment = fresh_environment() | {"OMP_NUM_THREADS": "1"} | variables  # of the session's fork server
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=folder, env=environment, **pipes)


def test_on_the_loopback_address_only_this_users_processes_come_in(tmp_path):
    (tmp_path / "train.py").write_text("import samestep\nwith samestep.world() as world:\n    print(world.size)\n")
    port = free_port()
    first = by_hand(tmp_path, 0, port)
    about = {"index": 1, "program": "x"}
    try:
        for guess in ("", "0" * 64, str(os.getuid())):
            with pytest.raises(RendezvousError, match="a different token"):
                connect(["127.0.0.1"], port, guess, about, seconds=60.0)
        second = by_hand(tmp_path, 1, port)
        said = second.communicate(timeout=100)[0]
        assert second.returncode == 0, said
        said = first.communicate(timeout=100)[0]
        assert first.returncode == 0, said
        assert said.count("2\n") >= 1
    finally:
        first.kill()
        first.communicate()
    secret = own_folder() / "secret"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert stat.S_IMODE(secret.parent.stat().st_mode) == 0o700


LOOKS = """
import glob, json, os, sys, time
import samestep
with samestep.world() as world:
    print("looked", flush=True)
    deadline = time.monotonic() + 60
    while not os.path.exists("go") and time.monotonic() < deadline:
        time.sleep(0.02)
"""
LISTENS = "0A"  # of proc_net_tcp(5)


def listening():
    """The addresses at which processes of this user's runs listen, by inode, with what IPv4 and IPv6 call loopback."""
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
            _, local, _, state, *_, inode = (*line.split()[:4], line.split()[9])
            if state == LISTENS:
                found[inode] = local.partition(":")[0]
    return found


def sockets_of(process):
    """The inodes of a process's sockets, and of all its children's."""
    inodes = set()
    for child in [process, *descendants(process)]:
        for descriptor in Path(f"/proc/{child}/fd").glob("*"):
            with contextlib.suppress(OSError):
                if found := re.fullmatch(r"socket:\[(\d+)\]", str(descriptor.readlink())):
                    inodes.add(found[1])
    return inodes


def descendants(process):
    for task in Path(f"/proc/{process}/task").glob("*"):
        for child in (task / "children").read_text(encoding="ascii").split():
            yield int(child)
            yield from descendants(int(child))


LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


def test_a_run_on_one_host_listens_on_the_loopback_address_alone_and_tells_nobody_its_secrets(tmp_path):
    (tmp_path / "train.py").write_text(LOOKS, encoding="utf-8")
    port, secret = free_port(), "5ecret" * 8
    nodes = [by_hand(tmp_path, number, port, SAMESTEP_TOKEN=secret) for number in (0, 1)]
    try:
        assert any("looked" in line for line in nodes[0].stdout)
        family = [process for node in nodes for process in (node.pid, *descendants(node.pid))]
        places = listening()
        there = [places[inode] for node in nodes for inode in sockets_of(node.pid) if inode in places]
        assert there
        assert set(there) <= LOOPBACK, there
        lines = [Path(f"/proc/{process}/cmdline").read_bytes() for process in family]
        assert len(lines) > 2
        assert not any(secret.encode() in line for line in lines)
    finally:
        (tmp_path / "go").touch()
        said = "".join(node.communicate(timeout=100)[0] for node in nodes)
    assert [node.returncode for node in nodes] == [0, 0], said
    kept = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert secret not in said
    assert secret.encode() not in kept


# --- temporary files and other users --------------------------------------------------------------


def test_a_folder_that_somebody_else_has_made_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = own_folder()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.rmdir()
    (tmp_path / "theirs").mkdir()
    folder.symlink_to(tmp_path / "theirs")
    with pytest.raises(PermissionError, match="belongs to somebody else"):
        own_folder()
    folder.unlink()
    folder.mkdir()
    monkeypatch.setattr(os, "getuid", lambda: 4242)
    folder.rename(tmp_path / "samestep-4242")
    with pytest.raises(PermissionError, match="belongs to somebody else"):
        own_folder()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process as another user")
def test_another_user_is_not_taken_for_a_rank(tmp_path):
    """Abstract sockets have names that everybody can read in /proc/net/unix, and no permissions."""
    started = subprocess.Popen(
        [sys.executable, "-c", WATCHED], cwd=tmp_path, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )
    try:
        name = started.stdout.readline().strip()
        assert name in Path("/proc/net/unix").read_text(encoding="ascii")
        answers = [ask(name, user) for user in (NOBODY, 0)]
    finally:
        started.communicate("\n", timeout=60)
    assert answers == ["turned away", "taken in"]


NOBODY = 65534
WATCHED = "from samestep.launch.monitor.attach import start_watcher; print(start_watcher(2, 2), flush=True); input()"
ASKING = """
import os, socket, sys, tempfile
from samestep import progress
record, stacks = progress.create(), tempfile.TemporaryFile()
os.setuid(int(sys.argv[2]))
stream = socket.socket(socket.AF_UNIX)
stream.settimeout(20)
try:
    stream.connect("\\0" + sys.argv[1])
    socket.send_fds(stream, [b"0"], [stacks.fileno(), record])
    print("taken in" if stream.recv(1) == b"+" else "turned away")
except OSError:
    print("turned away")
"""


def ask(name, user):
    command = [sys.executable, "-c", ASKING, name, str(user)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()


def test_secrets_of_the_environment_stay_on_this_host(monkeypatch):
    for name in ("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "SAMESTEP_TOKEN", "NCCL_DEBUG"):
        monkeypatch.setenv(name, "x")
    along = forwarded_environment([])
    assert along.get("NCCL_DEBUG") == "x"
    assert not {"AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "SAMESTEP_TOKEN"} & set(along)
    assert forwarded_environment(["HF_TOKEN"])["HF_TOKEN"] == "x"
