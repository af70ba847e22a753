"""Hosts started by hand, once on each: what a person at each of them sees, and what is refused, where and when."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from namespaces import hosts
from test_hosts import FORKED, ONE_THREAD, SECRET, finish

from ports import free_port

RUN = [sys.executable, "-P", "-m", "samestep", "run"]
IMPATIENT = [sys.executable, str(Path(__file__).with_name("impatient.py")), "run"]  # says after 0.5 s for whom it waits


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    with hosts(tmp_path_factory.mktemp("lab"), 3, servers=False) as built:
        yield built


def lines_of(process):
    """Yields what a process says on standard error, as it says it."""
    return iter(process.stderr.readline, "")


def until(process, text):
    """Returns the next line of a process's standard error that holds `text`."""
    heard = []
    for line in lines_of(process):
        heard.append(line)
        if text in line:
            return line
    raise AssertionError(f"{text!r} was never said: {''.join(heard)}")


def test_a_script_that_is_not_the_same_everywhere(folder, lab, tmp_path):
    other = tmp_path / "elsewhere"
    other.mkdir()
    (other / "train.py").write_text("print('an older one')")
    address = f"{lab.bridge}:{free_port()}"
    secret = {"SAMESTEP_TOKEN": SECRET}
    first = folder.start("--nnodes", 2, "--node-rank", 0, "--rendezvous", address, folder.script(""), env=secret)
    command = [*RUN, "--nnodes", "2", "--node-rank", "1", "--rendezvous", address]
    second = subprocess.Popen([*command, "train.py"], cwd=other, env={**os.environ, **secret}, stderr=subprocess.PIPE)
    _, said = second.communicate(timeout=60)
    for text in (finish(first)[2], said.decode()):
        assert "samestep: error: train.py is not the same on all hosts (sha256" in text
    assert (first.returncode, second.returncode) == (2, 2)


@pytest.fixture
def by_hand(lab, folder):
    """Starts `samestep run --nnodes` on a host of the lab; ends what a test has left."""
    port = free_port()
    started = []

    def start(name, index, count, *arguments, env=None, run=RUN):
        where = ["--nnodes", count, "--node-rank", index, "--rendezvous", f"{lab.address('node1')}:{port}"]
        command = [*run, *map(str, [*where, *FORKED, *arguments])]
        piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": folder.path}
        environment = {**os.environ, **ONE_THREAD, "SAMESTEP_TOKEN": SECRET, **(env or {})}
        started.append(lab.start(name, command, env=environment, **piped))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
            process.communicate()


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
    words = [*RUN, *FORKED, "--nproc_per_node=1", "--nnodes=2", "--master_addr=127.0.0.1"]
    port = f"--master_port={free_port()}"
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": folder.path}
    piped["env"] = {**os.environ, **ONE_THREAD}
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
    second = by_hand("node2", 1, 3, "--join-timeout", 3, script)
    code, _, err = finish(by_hand("node1", 0, 3, "--join-timeout", 2, script))
    assert code == 2
    assert "waited 2 s, and node 2 never came (1 of the 2 that were waited for): start" in err
    code, _, err = finish(second)
    assert (code, "error: waited 2 s, and node 2 never came (1 of the 2 that were waited for)" in err) == (2, True), err


def test_a_host_with_another_token_is_told_so(by_hand, folder):
    script = folder.script("")
    first = by_hand("node1", 0, 2, "--join-timeout", 2, script)
    code, _, err = finish(by_hand("node2", 1, 2, "--join-timeout", 4, script, env={"SAMESTEP_TOKEN": SECRET[::-1]}))
    assert code == 2
    assert "the controller uses a different token: set the same SAMESTEP_TOKEN on every host" in err
    finish(first)


def test_hosts_started_by_hand_need_a_secret(by_hand, folder):
    code, _, err = finish(by_hand("node1", 0, 2, folder.script(""), env={"SAMESTEP_TOKEN": "short"}))
    assert code == 2
    assert "set SAMESTEP_TOKEN to the same 16 or more random characters on every host" in err


def test_a_second_host_of_one_number_is_turned_away_and_the_right_one_may_come(by_hand, folder):
    script = folder.script("join()\nmeet()")
    first, second = by_hand("node1", 0, 3, script), by_hand("node2", 1, 3, script)
    until(second, "node 1 of 3: 1 rank, whose output comes on 10.")
    code, _, err = finish(by_hand("node3", 1, 3, script))
    assert code == 2
    assert "samestep: error: node 1 is there twice, and " in err
    assert until(first, "was rejected: node 1 is there twice").startswith("samestep: note: ")
    third = by_hand("node3", 2, 3, script)
    assert [finish(process)[0] for process in (first, second, third)] == [0, 0, 0]


def test_a_number_that_is_none_of_the_heads_is_told_so(by_hand, folder):
    script = folder.script("join()\nmeet()")
    first = by_hand("node1", 0, 2, script)
    code, _, err = finish(by_hand("node2", 2, 3, script))
    assert (code, "error: node 2 is none of 1 to 1: give each host a --node-rank" in err) == (2, True), err
    assert "rejected" in until(first, "node 2 is none of 1 to 1")
    assert finish(by_hand("node2", 1, 2, script))[0] == finish(first)[0] == 0


def test_another_command_than_the_heads_is_refused_on_both_sides(by_hand, folder):
    script = folder.script("join()\nmeet()")
    first = by_hand("node1", 0, 2, script)
    code, _, err = finish(by_hand("node2", 1, 2, script, "--steps", 2))
    told = "node 1 was started with `train.py --steps 2` and node 0 with `train.py`: give the same command on all"
    assert (code, told in err) == (2, True), err
    assert "rejected" in until(first, told)
    assert finish(by_hand("node2", 1, 2, script))[0] == finish(first)[0] == 0


def test_who_has_gone_while_others_are_waited_for_may_come_again(by_hand, folder):
    script = folder.script("join()\nmeet()")
    first, second = by_hand("node1", 0, 3, script), by_hand("node2", 1, 3, script)
    until(second, "node 1 of 3")
    second.send_signal(signal.SIGINT)
    assert finish(second)[0] == 130
    others = [by_hand("node2", 1, 3, script), by_hand("node3", 2, 3, script)]
    assert [finish(process)[0] for process in (first, *others)] == [0, 0, 0]


def test_both_sides_say_for_whom_they_wait(by_hand, folder, lab):
    script = folder.script("join()\nmeet()")
    second = by_hand("node2", 1, 3, script, run=IMPATIENT)
    line = until(second, "waiting")
    assert line.startswith(f"samestep: waiting for up to 300 s for node 0 to answer at {lab.address('node1')}:")
    first = by_hand("node1", 0, 3, script)
    line = until(first, "waiting")
    assert line.startswith(f"samestep: waiting for up to 300 s for node 2 to come in at {lab.address('node1')}:")
    third = by_hand("node3", 2, 3, script)
    assert [finish(process)[0] for process in (first, second, third)] == [0, 0, 0]


def test_a_person_at_another_host_hears_where_the_output_comes_and_how_it_ended(by_hand, folder, lab):
    script = folder.script("join()\nmeet()\nif rank == 1: raise KeyError('label')\nmeet()")
    first, second = by_hand("node1", 0, 2, script), by_hand("node2", 1, 2, "-n", 2, script)
    assert finish(first)[0] == 1
    code, out, err = finish(second)
    assert (code, out) == (1, "")
    assert err.splitlines() == [
        f"samestep: node 1 of 2: 2 ranks, whose output comes on {lab.address('node1')}",
        "samestep: the run is over, exit code 1: error: rank 1 of 3 failed: KeyError: 'label'",
    ]


def test_a_port_that_is_taken_may_be_that_of_a_second_node_0(by_hand, folder):
    script = folder.script("join()\nmeet()")
    first = by_hand("node1", 0, 2, script, run=IMPATIENT)
    until(first, "waiting")
    code, _, err = finish(by_hand("node1", 0, 2, script))
    assert (code, "give it another --node-rank" in err) == (2, True), err
    assert finish(by_hand("node2", 1, 2, script))[0] == finish(first)[0] == 0


CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 5).close()"


@pytest.mark.parametrize("name", ["localhost", "the bridge"])
def test_who_needs_no_secret_is_out_of_reach_of_other_hosts(lab, folder, name):
    host, secret = ("localhost", "") if name == "localhost" else (lab.bridge, SECRET)
    port = free_port()
    words = ["--nnodes", 2, "--rendezvous", f"{host}:{port}", *FORKED, folder.script("join()\nmeet()")]
    environment = {**ONE_THREAD, "SAMESTEP_TOKEN": secret}
    first = folder.start("--node-rank", 0, *words, env=environment, program=IMPATIENT[1:2])
    until(first, "waiting")
    outsider = lab.start("node1", [sys.executable, "-c", CONNECT, lab.bridge, str(port)], stderr=subprocess.PIPE)
    _, said = outsider.communicate(timeout=60)
    assert (b"ConnectionRefusedError" in said) == (not secret)
    second = folder.start("--node-rank", 1, *words, env=environment)
    assert finish(second)[0] == finish(first)[0] == 0
