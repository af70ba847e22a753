"""Several hosts, with addresses, names and sshd's of their own, over every transport; how they fail."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from namespaces import hosts
from test_supervise import wait_until_gone

from deadline import in_time
from samestep.cli import main

VIAS = ("ssh", "pdsh", "clush")
SSH_FIRST = ["ssh", *(pytest.param(via, marks=pytest.mark.prove) for via in VIAS[1:])]
SECRET = "0123456789abcdef"
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # for which the fork server has imported torch, so that ranks are forks, too,
FORKED = ["--start", "fork"]  # also a host's only one
WITHIN = 5.0  # seconds for a usage error


@pytest.fixture(scope="module")
def lab_of_all(tmp_path_factory):
    with hosts(tmp_path_factory.mktemp("lab"), 2) as built:
        yield built


@pytest.fixture
def lab(lab_of_all):
    """Two hosts, which the test may wreck."""
    yield lab_of_all
    lab_of_all.repair()


@pytest.fixture
def on_hosts(lab, folder):
    """Starts `samestep run` on two hosts of the lab."""

    def start(*arguments, listed="node1,node2", via="ssh"):
        words = ["--json", folder.json, "--hosts", listed, "--via", via, *lab.reached, *FORKED, *arguments]
        return folder.start(*words, env=ONE_THREAD)

    return start


def finish(process, seconds=90):
    out, err = process.communicate(timeout=seconds)
    return process.returncode, out, err


MEET = """
join()
value = meet()
import socket
print(value, os.environ["LOCAL_RANK"], os.environ["GROUP_RANK"], socket.gethostname())
"""


@pytest.mark.parametrize("via", ["ssh", "pdsh", pytest.param("clush", marks=pytest.mark.prove)])
def test_ranks_on_two_hosts_meet(on_hosts, folder, lab, via):
    code, out, err = finish(on_hosts("-n", 2, folder.script(MEET), via=via))
    assert code == 0, err
    assert sorted(out.splitlines()) == [
        "[rank 0] 4 0 0 node1",
        "[rank 1] 4 1 0 node1",
        "[rank 2] 4 0 1 node2",
        "[rank 3] 4 1 1 node2",
    ]
    assert not lab_processes(lab)
    (record,) = folder.path.glob("runs/*/run.json")
    assert json.loads(record.read_text())["hosts"] == {"node1": 2, "node2": 2}


def lab_processes(lab):
    """What runs on the hosts beside their sshd's."""
    found = [pid for name in lab.names for pid in lab.pids(name)]
    return [pid for pid in found if "sshd" not in command_of(pid)]


def command_of(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except FileNotFoundError:
        return "sshd, gone"


@pytest.mark.parametrize("via", SSH_FIRST)
def test_a_failure_on_another_host_is_blamed_on_its_rank_and_place(on_hosts, folder, lab, via):
    script = folder.script("join()\nmeet()\nif rank == 3:\n    raise KeyError('label')\nmeet()\ntime.sleep(600)")
    code, _, err = finish(on_hosts("-n", 2, script, via=via))
    failure = folder.result["failure"]
    assert (code, failure["rank"], failure["host"], failure["exception"]) == (1, 3, "node2", "KeyError")
    assert "raise KeyError('label')" in err
    assert (next(folder.path.glob("runs/*")) / "0/node2/rank3.err").read_text().endswith("KeyError: 'label'\n")
    assert not lab_processes(lab)


STAY = """
import subprocess
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
join()
meet()
with open(f"pids{rank}.tmp", "w") as file:
    print(os.getpid(), child.pid, file=file)
os.rename(f"pids{rank}.tmp", f"pids{rank}")
"""


def await_ranks(folder, ranks):
    files = [folder.path / f"pids{rank}" for rank in range(ranks)]
    while not all(file.exists() for file in files):
        time.sleep(0.02)  # the test's own deadline ends this
    return [int(pid) for file in files for pid in file.read_text().split()]


@pytest.mark.parametrize("via", SSH_FIRST)
def test_nothing_is_left_on_any_host_when_the_launcher_is_killed(on_hosts, folder, lab, via):
    process = on_hosts("-n", 1, folder.script(STAY + "time.sleep(600)"), via=via)
    running = await_ranks(folder, 2)
    process.kill()
    process.communicate()
    wait_until_gone(running)


def test_a_dropped_connection_of_ssh_ends_its_host_and_is_told(on_hosts, folder, lab):
    process = on_hosts("-n", 1, folder.script(STAY + "time.sleep(600)"))
    running = await_ranks(folder, 2)
    clients = [
        pid for pid in children_of(process.pid) if command_of(pid).startswith("ssh ") and " node2 " in command_of(pid)
    ]
    os.kill(clients[0], signal.SIGKILL)
    code, _, err = finish(process)
    assert code == 1
    assert "host node2 is lost" in err
    wait_until_gone(running)


def children_of(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_host_that_is_lost_is_named_and_the_run_stops(on_hosts, folder, lab):
    process = on_hosts("-n", 1, folder.script(STAY + "time.sleep(600)"))
    running = await_ranks(folder, 2)
    lost_at = time.monotonic()
    lab.crash("node2")
    code, _, err = finish(process)
    assert in_time(time.monotonic() - lost_at, 5)
    assert (code, folder.result["failure"]["host"]) == (1, "node2")
    assert "error: host node2 is lost: its agent has ended, or the connection to it" in err
    assert "process 0" not in err
    assert "--lost-host wait waits for it" in err
    wait_until_gone(running)


@pytest.mark.prove
def test_a_host_behind_a_cable_that_was_pulled_is_lost_within_its_silence(on_hosts, folder, lab):
    process = on_hosts("-n", 1, folder.script(STAY + "time.sleep(600)"))
    running = await_ranks(folder, 2)
    lost_at = time.monotonic()
    lab.partition("node2")
    code, _, err = finish(process)
    assert in_time(time.monotonic() - lost_at, 10 + 5)
    assert (code, folder.result["failure"]["host"]) == (1, "node2")
    assert "host node2 is lost: no heartbeat for 10 s" in err
    wait_until_gone(running)  # on the other side of the cut as well: nobody can be heard there either


def test_a_restart_goes_on_with_the_hosts_that_are_left(on_hosts, folder, lab):
    script = folder.script(
        STAY + "if size == 1:\n    open('alone', 'w').write(repr(time.monotonic()))\nelse:\n    time.sleep(600)"
    )
    process = on_hosts("-n", 1, "--restarts", 1, "--lost-host", "continue", script)
    await_ranks(folder, 2)
    lost_at = time.monotonic()
    lab.crash("node2")
    code, _, err = finish(process)
    assert code == 0, err
    assert float((folder.path / "alone").read_text()) - lost_at < 10
    assert "restart 1 of 1: the rank starts again, 2 before" in err


def refused(process, started_at=None):
    """Returns the one line of a usage error, which must come soon."""
    began = time.monotonic()
    code, _, err = finish(process, 30)
    assert in_time(time.monotonic() - began, WITHIN)
    beside = ("samestep: note", "samestep: waiting")  # the second only where the machine is busy
    lines = [line for line in err.splitlines() if not line.startswith(beside)]
    assert (code, len(lines)) == (2, 1), err
    return lines[0]


def test_an_unknown_host(on_hosts, folder):
    line = refused(on_hosts(folder.script(""), listed="node1,nowhere.invalid,elsewhere.invalid"))
    assert "host nowhere.invalid: its name is unknown" in line
    assert "host elsewhere.invalid: its name is unknown" in line


def test_more_ranks_than_a_host_has_room_for(on_hosts, folder):
    line = refused(on_hosts("-n", 3, folder.script(""), listed="node1:2,node2:4"))
    assert "host node1 has 2 slots and 3 ranks are asked for" in line


def test_a_list_that_cannot_be_read(on_hosts, folder):
    assert "node[1-" in refused(on_hosts(folder.script(""), listed="node[1-"))


def test_an_interface_that_does_not_exist(on_hosts, folder):
    line = refused(on_hosts("--interface", "eth7", folder.script("")))
    assert "there is no network interface eth7 on node1; there are eth0 (10." in line


def test_a_pair_of_hosts_that_cannot_connect(on_hosts, folder, lab):
    for one, other in (("node1", "node2"), ("node2", "node1")):
        lab.forget(one, other)
    line = refused(on_hosts(folder.script("")))
    assert "host node1 cannot reach host node2 (there is no route to it); nor the other way round" in line


@pytest.mark.prove
def test_a_script_that_is_only_here_or_not_the_same_here(lab, folder, tmp_path):
    """The hosts of the lab share this machine's files; one that has others is looked at from another directory."""
    python = tmp_path / "python"
    (tmp_path / "there").mkdir()
    python.write_text(f'#!/bin/sh\nmount --bind {tmp_path}/there {folder.path}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    inside = tmp_path / "unshared"
    inside.write_text(f'#!/bin/sh\nexec unshare --mount {python} "$@"\n')
    inside.chmod(0o755)
    words = ["--hosts", "node1,node2", "--ssh-args", lab.ssh_args, "--remote-python", inside, folder.script("")]
    assert f"there is no train.py in {folder.path} on host node1: copy it there" in refused(folder.start(*words))
    (tmp_path / "there" / "train.py").write_text("print('an older one')")
    assert "train.py is not the same on all hosts (sha256 here " in refused(folder.start(*words))


def test_an_interface_that_others_cannot_reach(on_hosts, folder):
    line = refused(on_hosts("--interface", "lo", folder.script("")))
    assert "host node1 cannot reach host node2 on its lo, 127.0.0.1 (" in line
    assert line.endswith("name another network with --interface, or leave it out")


def test_the_interface_that_was_asked_for_is_used(on_hosts, folder):
    script = folder.script("join()\nprint(meet(), os.environ['GLOO_SOCKET_IFNAME'])")
    code, out, err = finish(on_hosts("-n", 1, "--interface", "eth0", script))
    assert code == 0, err
    assert sorted(out.splitlines()) == ["[rank 0] 2 eth0", "[rank 1] 2 eth0"]


def test_hosts_of_a_file_get_the_variables_that_are_taken_along(lab, folder):
    (folder.path / "hosts.txt").write_text("node1 slots=1\nnode2 slots=1\n")
    script = folder.script("print(rank, os.environ.get('MINE'), os.environ.get('OTHER'))")
    words = ["--hostfile", "hosts.txt", *lab.reached, *FORKED, "--env", "MINE", script]
    code, out, err = finish(folder.start(*words, env=ONE_THREAD | {"MINE": "a b", "OTHER": "c"}))
    assert code == 0, err
    assert sorted(out.splitlines()) == ["[rank 0] 0 a b None", "[rank 1] 1 a b None"]


def test_hosts_that_are_slow_to_come_are_named(on_hosts, folder, lab, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    slow = tmp_path / "python"
    slow.write_text(f'#!/bin/sh\n[ "$(hostname)" = node1 ] || read line <{pipe}\nexec {lab.python} "$@"\n')
    slow.chmod(0o755)
    process = on_hosts("--remote-python", slow, folder.script(""))
    line = process.stderr.readline()
    assert line == "samestep: waiting for up to 15 s for node2 to answer over ssh and to connect to this host\n"
    pipe.write_text("go\n")
    assert finish(process)[0] == 0


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--nnodes", "2"), "--nnodes 2 needs --node-rank, from 0 to 1"),
        (("--nnodes", "2", "--node-rank", "2"), "--nnodes 2 needs --node-rank, from 0 to 1"),
        (("--nnodes", "2", "--node-rank", "0"), "--nnodes 2 needs --rendezvous HOST:PORT"),
        (("--nnodes", "2", "--node-rank", "0", "--rendezvous", "here"), "give HOST:PORT"),
        (("--nnodes", "2", "--node-rank", "0", "--rendezvous", "x.invalid:1"), "the name x.invalid is unknown"),
        (("--nnodes", "2", "--node-rank", "0", "--rendezvous", "203.0.113.7:1"), "203.0.113.7 is not this host, which"),
        (("--hosts", "a", "--nnodes", "2"), "--hosts and --nnodes both say which hosts"),
        (("--hosts", "a", "--env", "NO_SUCH"), "--env NO_SUCH: there is no such variable here"),
        (("--hostfile", "nothing"), "the host file nothing cannot be read: No such file or directory"),
    ],
)
def test_options_that_do_not_fit(folder, words, told, monkeypatch, capfd):
    monkeypatch.chdir(folder.path)
    assert main(["run", *words, folder.script("")]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert told in line


def test_a_dry_run_shows_the_commands_and_starts_nothing(folder, monkeypatch, capfd):
    monkeypatch.chdir(folder.path)
    assert main(["run", "--dry-run", "-n", "2", "--hosts", "a,b", "--via", "ssh", folder.script("")]) == 0
    out = capfd.readouterr().out
    assert out.count("-m samestep.launch.agent") == 2
    assert "token" not in out.replace("address and token go to its standard input", "")
    assert "RANK=3" in out
    assert not (folder.path / "runs").exists()
