"""Several hosts, with addresses, names and sshd's of their own, over every transport; what may go wrong with them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from namespaces import hosts
from test_supervise import wait_until_gone

VIAS = ("ssh", "pdsh", "clush")
SECRET = "0123456789abcdef"
WITHIN = 5.0  # seconds for a usage error
LEEWAY = 3.0  # for a busy machine


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    with hosts(tmp_path_factory.mktemp("lab"), 3) as built:
        yield built


@pytest.fixture
def on_hosts(lab, folder):
    """Starts `samestep run` on two hosts of the lab."""

    def start(*arguments, listed="node1,node2", via="ssh", **options):
        return folder.start(
            "--json", folder.json, "--hosts", listed, "--via", via, "--ssh-args", lab.ssh_args, *arguments, **options
        )

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


@pytest.mark.parametrize("via", VIAS)
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


def lab_processes(lab):
    """What runs on the hosts beside their sshd's."""
    found = [pid for name in lab.names for pid in lab.pids(name)]
    return [pid for pid in found if "sshd" not in command_of(pid)]


def command_of(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except FileNotFoundError:
        return "sshd, gone"


@pytest.mark.parametrize("via", VIAS)
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


@pytest.mark.parametrize("via", VIAS)
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


def test_a_host_that_is_lost_is_named_and_the_run_stops(on_hosts, folder, lab_of_two):
    lab, start = lab_of_two
    process = start("-n", 1, folder.script(STAY + "time.sleep(600)"))
    running = await_ranks(folder, 2)
    lost_at = time.monotonic()
    lab.crash("node2")
    code, _, err = finish(process)
    assert time.monotonic() - lost_at < 5 + LEEWAY
    assert (code, folder.result["failure"]["host"]) == (1, "node2")
    assert "host node2 is lost: its agent has ended, or the connection to it" in err
    wait_until_gone(running)


@pytest.fixture
def lab_of_two(tmp_path_factory, folder):
    """A lab of one test's own, which may be wrecked."""
    with hosts(tmp_path_factory.mktemp("own"), 2) as own:

        def start(*arguments):
            return folder.start("--json", folder.json, "--hosts", "node1,node2", "--ssh-args", own.ssh_args, *arguments)

        yield own, start


def test_a_host_behind_a_cable_that_was_pulled_is_lost_within_its_silence(on_hosts, folder, lab_of_two):
    lab, start = lab_of_two
    process = start("-n", 1, folder.script(STAY + "time.sleep(600)"))
    running = await_ranks(folder, 2)
    lost_at = time.monotonic()
    lab.partition("node2")
    code, _, err = finish(process)
    assert time.monotonic() - lost_at < 10 + 5 + LEEWAY
    assert (code, folder.result["failure"]["host"]) == (1, "node2")
    assert "host node2 is lost: no sign of life for 10 s" in err
    wait_until_gone(running)  # on the other side of the cut as well: nobody can be heard there either


def test_a_restart_goes_on_with_the_hosts_that_are_left(on_hosts, folder, lab_of_two):
    lab, start = lab_of_two
    script = folder.script(
        STAY + "if size == 1:\n    open('alone', 'w').write(repr(time.monotonic()))\nelse:\n    time.sleep(600)"
    )
    process = start("-n", 1, "--restarts", 1, "--lost-host", "continue", script)
    await_ranks(folder, 2)
    lost_at = time.monotonic()
    lab.crash("node2")
    code, _, err = finish(process)
    assert code == 0, err
    assert float((folder.path / "alone").read_text()) - lost_at < 10
    assert "restart 1 of 1: all 1 ranks" in err


def refused(process, started_at=None):
    """Returns the one line of a usage error, which must come soon."""
    began = time.monotonic()
    code, _, err = finish(process, 30)
    assert time.monotonic() - began < WITHIN + LEEWAY
    lines = [line for line in err.splitlines() if not line.startswith("samestep: note")]
    assert (code, len(lines)) == (2, 1), err
    return lines[0]


def test_an_unknown_host(on_hosts, folder):
    line = refused(on_hosts(folder.script(""), listed="node1,nowhere.invalid"))
    assert "host nowhere.invalid: its name is unknown" in line


def test_a_key_that_is_refused(on_hosts, folder, lab, tmp_path):
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "key"], check=True)
    config = (lab.folder / "ssh_config").read_text().replace(str(lab.folder / "user_key"), str(tmp_path / "key"))
    (tmp_path / "config").write_text(config)
    process = folder.start("--hosts", "node1", "--ssh-args", f"-F {tmp_path / 'config'}", folder.script(""))
    assert "host node1: it does not accept your key; put it there with `ssh-copy-id node1`" in refused(process)


def test_a_host_without_samestep(on_hosts, folder, tmp_path):
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    line = refused(on_hosts("--remote-python", bare, folder.script("")))
    assert f"samestep is missing there; run `{bare} -m pip install samestep` on it" in line


def test_more_ranks_than_a_host_has_room_for(on_hosts, folder):
    line = refused(on_hosts("-n", 3, folder.script(""), listed="node1:2,node2:4"))
    assert "host node1 has 2 slots and 3 ranks are asked for" in line


def test_a_list_that_cannot_be_read(on_hosts, folder):
    assert "node[1-" in refused(on_hosts(folder.script(""), listed="node[1-"))


def test_an_interface_that_does_not_exist(on_hosts, folder):
    line = refused(on_hosts("--interface", "eth7", folder.script("")))
    assert "there is no network interface eth7 on node1; there are eth0 (10." in line


def test_a_pair_of_hosts_that_cannot_connect(folder, lab_of_two):
    lab, start = lab_of_two
    for one, other in (("node1", "node2"), ("node2", "node1")):
        route = ["ip", "-n", lab.namespace(one), "route", "add", "unreachable", f"{lab.address(other)}/32"]
        subprocess.run(route, check=True)
    line = refused(start(folder.script("")))
    assert "host node1 cannot reach host node2 (there is no route to it); nor the other way round" in line


def test_a_script_that_is_not_the_same_everywhere(folder, lab, tmp_path):
    other = tmp_path / "elsewhere"
    other.mkdir()
    (other / "train.py").write_text("print('an older one')")
    address = f"{lab.bridge}:{free_port(lab.bridge)}"
    secret = {"SAMESTEP_TOKEN": SECRET}
    first = folder.start("--nnodes", 2, "--node-rank", 0, "--rendezvous", address, folder.script(""), env=secret)
    command = [
        sys.executable,
        "-P",
        "-m",
        "samestep",
        "run",
        "--nnodes",
        "2",
        "--node-rank",
        "1",
        "--rendezvous",
        address,
    ]
    second = subprocess.Popen([*command, "train.py"], cwd=other, env={**os.environ, **secret}, stderr=subprocess.PIPE)
    _, _, err = finish(first)
    second.communicate(timeout=60)
    assert "train.py is not the same on all hosts (sha256" in err


def free_port(address):
    with socket.create_server((address, 0)) as server:
        return server.getsockname()[1]


@pytest.fixture
def by_hand(lab, folder):
    """Starts `samestep run --nnodes` on a host of the lab."""
    port = 20000 + os.getpid() % 20000

    def start(name, index, count, *arguments, env=None):
        words = ["--nnodes", count, "--node-rank", index, "--rendezvous", f"{lab.address('node1')}:{port}", *arguments]
        command = [sys.executable, "-P", "-m", "samestep", "run", *map(str, words)]
        piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": folder.path}
        return lab.start(
            name,
            command,
            env={**os.environ, "SAMESTEP_TOKEN": SECRET, **(env or {})},
            **piped,
        )

    return start


def test_hosts_started_by_hand_meet_with_any_number_of_ranks(by_hand, folder):
    script = folder.script("join()\nprint(meet(), os.environ['LOCAL_RANK'], os.environ['LOCAL_WORLD_SIZE'])")
    second = by_hand("node2", 1, 2, "-n", 1, script)
    code, out, err = finish(by_hand("node1", 0, 2, "-n", 2, script))
    assert code == 0, err
    assert sorted(out.splitlines()) == ["[rank 0] 3 0 2", "[rank 1] 3 1 2", "[rank 2] 3 0 1"]
    assert finish(second)[0] == 0


def test_hosts_started_by_hand_meet_through_a_file_that_is_its_own_secret(by_hand, folder):
    options = ["--rendezvous", folder.path / "meeting", folder.script("join()\nmeet()")]
    second = by_hand("node2", 1, 2, *options, env={"SAMESTEP_TOKEN": ""})
    assert finish(by_hand("node1", 0, 2, *options, env={"SAMESTEP_TOKEN": ""}))[0] == 0
    assert finish(second)[0] == 0


def test_torchruns_own_options_start_the_same(lab, folder):
    script = folder.script("join()\nprint(meet())")
    words = [
        sys.executable,
        "-P",
        "-m",
        "samestep",
        "run",
        "--nproc_per_node=1",
        "--nnodes=2",
        "--master_addr=127.0.0.1",
    ]
    port = f"--master_port={free_port('127.0.0.1')}"
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": folder.path}
    second, first = (subprocess.Popen([*words, port, f"--node_rank={rank}", script], **piped) for rank in (1, 0))
    code, out, err = finish(first)
    assert code == 0, err
    assert sorted(out.splitlines()) == ["[rank 0] 2", "[rank 1] 2"]
    assert finish(second)[0] == 0


def test_every_host_started_by_hand_ends_with_the_runs_code(by_hand, folder):
    script = folder.script("join()\nmeet()\nsys.exit(7) if rank == 1 else meet()")
    second = by_hand("node2", 1, 2, script)
    assert finish(by_hand("node1", 0, 2, script))[0] == 7
    assert finish(second)[0] == 7


def test_a_host_that_never_comes_is_named_at_the_join_timeout(by_hand, folder):
    script = folder.script("")
    second = by_hand("node2", 1, 3, "--join-timeout", 4, script)
    code, _, err = finish(by_hand("node1", 0, 3, "--join-timeout", 3, script))
    assert code == 2
    assert "waited 3 s, and 1 of 2 hosts never came (node 2)" in err
    finish(second)


def test_a_host_with_another_token_is_told_so(by_hand, folder):
    script = folder.script("")
    first = by_hand("node1", 0, 2, "--join-timeout", 4, script)
    code, _, err = finish(by_hand("node2", 1, 2, "--join-timeout", 4, script, env={"SAMESTEP_TOKEN": SECRET[::-1]}))
    assert code == 2
    assert "the head of the run has another token: set the same SAMESTEP_TOKEN on every host" in err
    finish(first)


def test_hosts_started_by_hand_need_a_secret(by_hand, folder):
    code, _, err = finish(by_hand("node1", 0, 2, folder.script(""), env={"SAMESTEP_TOKEN": "short"}))
    assert code == 2
    assert "set SAMESTEP_TOKEN to the same 16 or more random characters on every host" in err


def test_two_hosts_of_one_number_are_refused(by_hand, folder):
    script = folder.script("")
    others = [by_hand(name, 1, 3, script) for name in ("node2", "node3")]
    code, _, err = finish(by_hand("node1", 0, 3, script))
    assert code == 2
    assert "node 1 is there twice" in err
    for other in others:
        finish(other)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--nnodes", "2"), "--nnodes 2 needs --node-rank, from 0 to 1"),
        (("--nnodes", "2", "--node-rank", "2"), "--nnodes 2 needs --node-rank, from 0 to 1"),
        (("--nnodes", "2", "--node-rank", "0"), "--nnodes 2 needs --rendezvous HOST:PORT"),
        (("--nnodes", "2", "--node-rank", "0", "--rendezvous", "here"), "give HOST:PORT"),
        (("--nnodes", "2", "--node-rank", "0", "--rendezvous", "x.invalid:1"), "the name x.invalid is unknown"),
        (("--hosts", "a", "--nnodes", "2"), "--hosts and --nnodes both say which hosts"),
        (("--hosts", "a", "--env", "NO_SUCH"), "--env NO_SUCH: there is no such variable here"),
        (("--hostfile", "nothing"), "the host file nothing cannot be read: No such file or directory"),
    ],
)
def test_options_that_do_not_fit(folder, words, told):
    assert told in refused(folder.start(*words, folder.script("")))


def test_a_dry_run_shows_the_commands_and_starts_nothing(folder):
    code, out, _ = finish(folder.start("--dry-run", "-n", 2, "--hosts", "a,b", "--via", "ssh", folder.script("")))
    assert code == 0
    assert out.count("-m samestep.launch.agent") == 2
    assert "token" not in out.replace("address and token go to its standard input", "")
    assert "RANK=3" in out
    assert not (folder.path / "runs").exists()


def test_the_result_is_written_with_the_run(on_hosts, folder):
    assert finish(on_hosts("-n", 1, folder.script(MEET)))[0] == 0
    (record,) = folder.path.glob("runs/*/run.json")
    assert json.loads(record.read_text())["hosts"] == {"node1": 1, "node2": 1}
