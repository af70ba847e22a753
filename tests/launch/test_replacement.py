"""A host is lost and the run waits for it, or for another in its place: `--lost-host wait`."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from namespaces import hosts
from slurm_cluster import slurm_cluster
from test_hosts import FORKED, ONE_THREAD, SECRET, await_ranks, children_of, command_of, finish
from test_supervise import wait_until_gone
from test_versions import other_version_on

from deadline import in_time
from ports import free_port
from samestep._version import __version__
from samestep.cli import main

AGAIN = 10.0  # seconds from the moment that the replacement is there to the first step

SCRIPT = """
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
join()
assert meet() == size
if attempt == 0:
    with open(f"pids{rank}.tmp", "w") as file:
        print(os.getpid(), file=file)
    os.rename(f"pids{rank}.tmp", f"pids{rank}")
    time.sleep(600)
open(f"again{rank}", "w").write(repr(time.monotonic()))
print("attempt", attempt, "size", size)
"""


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
def start(lab, folder):
    """Starts a run that waits for lost hosts, two ranks on each."""

    def begin(*arguments, restarts=1):
        reached = ["--hosts", "node1,node2", *lab.reached, *FORKED]
        wait = ["--restarts", restarts, "--lost-host", "wait"]
        return folder.start("--json", folder.json, *reached, "-n", 2, *wait, *arguments, env=ONE_THREAD)

    return begin


def agent_of(rank):
    """The agent of a rank, which is a fork of it."""
    return parent_of(rank)


def oldest(family):
    return next(pid for pid in family if parent_of(pid) not in family)


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


class Heard:
    """The lines of a run's standard error, as they come."""

    def __init__(self, process):
        self.process = process
        self.lines = []

    def until(self, part):
        for line in self.process.stderr:
            self.lines.append(line)
            if part in line:
                return line
        raise AssertionError(f"{part!r} was never said: {''.join(self.lines)}")


def resumed(folder, out, ranks=4):
    """Returns when all ranks had met again."""
    assert sorted(out.splitlines()) == [f"[rank {rank}] attempt 1 size {ranks}" for rank in range(ranks)]
    return max(float((folder.path / f"again{rank}").read_text()) for rank in range(ranks))


def test_an_agent_that_was_killed_is_started_again_through_the_same_transport(lab, start, folder):
    process = start(folder.script(SCRIPT))
    running = await_ranks(folder, 4)
    lost_at = time.monotonic()
    os.kill(agent_of(running[2]), signal.SIGKILL)
    code, out, err = finish(process)
    assert code == 0, err
    assert in_time(resumed(folder, out) - lost_at, AGAIN)
    assert (
        "host node2 is lost (its agent has ended, or the connection to it): trying to start its agent again over ssh, "
        "for up to 300 s (--join-timeout)" in err
    )
    assert "restart 1 of 1: all 4 ranks" in err
    wait_until_gone(running)


@pytest.mark.prove
@pytest.mark.parametrize("via", ["pdsh", "clush"])
def test_the_same_over_a_transport_that_has_started_others_too(lab, start, folder, via):
    process = start("--via", via, folder.script(SCRIPT))
    running = await_ranks(folder, 4)
    os.kill(agent_of(running[2]), signal.SIGKILL)
    code, out, err = finish(process)
    assert code == 0, err
    resumed(folder, out)


@pytest.mark.prove
def test_a_cable_that_is_put_back_brings_its_host_back(lab, start, folder):
    process = start(folder.script(SCRIPT))
    running = await_ranks(folder, 4)
    lab.partition("node2")
    heard = Heard(process)
    heard.until("host node2 is lost (no heartbeat for 10 s)")
    wait_until_gone(running)  # also where nobody can be reached
    lab.heal("node2")
    back_at = time.monotonic()
    code, out, err = finish(process)
    assert code == 0, err
    assert in_time(resumed(folder, out) - back_at, AGAIN)


def test_a_host_that_does_not_come_back_ends_the_run_with_its_cause(lab, start, folder):
    process = start("--join-timeout", 2, folder.script(SCRIPT))
    running = await_ranks(folder, 4)
    lost_at = time.monotonic()
    lab.crash("node2")  # its sshd as well
    code, _, err = finish(process)
    assert code == 1
    took = time.monotonic() - lost_at
    assert took > 2
    assert in_time(took, 2 + 5)
    assert "no replacement came within 2 s for host node2 (host node2: nothing listens there" in err
    assert (folder.result["failure"]["host"], folder.result["failure"]["exception"]) == ("node2", "HostLost")
    last = err[err.index("not started again") :].splitlines()
    assert last[1].startswith("samestep: error: host node2 is lost")
    assert last[-1].endswith("/0/node2")
    wait_until_gone(running)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.prove)]
)
def test_a_signal_ends_the_wait_at_once(lab, start, folder, number, code):
    process = start(folder.script(SCRIPT))
    running = await_ranks(folder, 4)
    lab.crash("node2")
    heard = Heard(process)
    heard.until("host node2 is lost")
    asked_at = time.monotonic()
    process.send_signal(number)
    assert (finish(process)[0], folder.result["exit"]) == (code, code)
    assert in_time(time.monotonic() - asked_at, 3)
    assert folder.result["failure"]["host"] == "node2"
    wait_until_gone(running)


@pytest.mark.prove
def test_a_host_that_is_lost_for_the_second_time_has_used_the_restarts_up(lab, start, folder):
    process = start(folder.script(SCRIPT.replace("attempt == 0", "True").replace('f"pids', 'f"{attempt}pids')))
    for attempt in (0, 1):
        while not (folder.path / f"{attempt}pids3").exists():
            time.sleep(0.02)  # the test's own deadline ends this
        os.kill(agent_of(int((folder.path / f"{attempt}pids3").read_text())), signal.SIGKILL)
    code, _, err = finish(process)
    assert code == 1
    assert err.count("trying to start its agent again") == 1


@pytest.mark.prove
def test_a_replacement_of_another_version_is_turned_away_until_it_is_fixed(lab, start, folder):
    wrong = folder.path / "wrong"
    python = other_version_on(lab, "node2", folder.path, "9.9.9", only_if=wrong)
    process = start("--remote-python", python, folder.script(SCRIPT))
    running = await_ranks(folder, 4)
    wrong.touch()
    os.kill(agent_of(running[2]), signal.SIGKILL)
    heard = Heard(process)
    line = heard.until("node2 cannot take the place")
    assert f"the hosts have different versions of samestep: node1 {__version__}, node2 9.9.9" in line
    wrong.unlink()
    code, out, err = finish(process)
    assert code == 0, err
    assert "cannot take the place" not in err  # once is enough
    assert "is lost (" not in err
    resumed(folder, out)


@pytest.fixture
def by_hand(lab, folder):
    port = free_port()

    def start(name, index, *arguments, count=2):
        where = ["--nnodes", count, "--node-rank", index, "--rendezvous", f"{lab.address('node1')}:{port}"]
        wait = [*FORKED, "-n", 2, "--restarts", 1, "--lost-host", "wait"]
        command = [sys.executable, "-P", "-m", "samestep", "run", *where, *wait, *arguments]
        return lab.start(
            name,
            list(map(str, command)),
            env={**os.environ, **ONE_THREAD, "SAMESTEP_TOKEN": SECRET},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder.path,
        )

    return start


def test_the_same_command_started_again_takes_the_place_of_the_one_that_was_killed(lab, by_hand, folder):
    script = folder.script(SCRIPT)
    first, second = by_hand("node1", 0, script), by_hand("node2", 1, script)
    running = await_ranks(folder, 4)
    second.kill()
    second.communicate()
    heard = Heard(first)
    line = heard.until("is lost")
    assert "waiting for up to 300 s (--join-timeout) for node 1 to come in at" in line
    third = by_hand("node2", 1, script)
    back_at = time.monotonic()
    code, out, err = finish(first)
    assert code == 0, err
    assert in_time(resumed(folder, out) - back_at, AGAIN)
    assert finish(third)[0] == 0
    wait_until_gone(running)


def test_an_agent_of_the_head_itself_is_forked_again(by_hand, folder):
    script = folder.script(SCRIPT)
    first, second = by_hand("node1", 0, script), by_hand("node2", 1, script)
    running = await_ranks(folder, 4)
    (own,) = [pid for pid in children_of(first.pid) if running[0] in children_of(pid)]
    os.kill(own, signal.SIGKILL)
    code, out, err = finish(first)
    assert code == 0, err
    resumed(folder, out)
    assert "has ended: starting another" in err
    assert finish(second)[0] == 0


def test_on_one_host_the_agent_is_forked_again(folder):
    process = folder.start("-n", 2, "--restarts", 1, "--lost-host", "wait", folder.script(SCRIPT), env=ONE_THREAD)
    (first, _) = await_ranks(folder, 2)
    os.kill(agent_of(first), signal.SIGKILL)
    code, out, err = finish(process)
    assert code == 0, err
    resumed(folder, out, ranks=2)


def test_who_comes_in_under_a_number_that_is_not_missing_is_turned_away(lab, by_hand, folder):
    script = folder.script(SCRIPT)
    waiting = ["--join-timeout", 20]
    first, second = (by_hand(f"node{index + 1}", index, *waiting, script, count=2) for index in (0, 1))
    await_ranks(folder, 4)
    second.kill()
    second.communicate()
    Heard(first).until("is lost")
    stranger = by_hand("node2", 2, script, count=3)
    told, _, said = finish(stranger)
    assert (told, "node 2 is none of 1 to 1" in said) == (2, True), said
    other = by_hand("node2", 1, script, "--another")
    told, _, said = finish(other)
    assert (told, "node 1 was started with `train.py --another` and node 0 with `train.py`" in said) == (2, True), said
    third = by_hand("node2", 1, script)
    code, out, err = finish(first)
    assert code == 0, err
    assert "joined and was rejected: node 2 is none of 1 to 1" in err
    resumed(folder, out)
    finish(third)


@pytest.mark.prove
def test_a_replacement_that_is_lost_while_it_is_examined_is_waited_for_again(lab, start, folder):
    dies = folder.path / "dies"
    python = other_version_on(lab, "node2", folder.path, __version__, only_if=dies)
    facts = folder.path / f"samestep-{__version__}" / "samestep" / "launch" / "hosts" / "host_info.py"
    end = f"import os, signal\nos.unlink({str(dies)!r})\nos.kill(os.getpid(), signal.SIGKILL)\n"
    facts.write_text(facts.read_text().replace("    cores = read_cores()\n", textwrap.indent(end, "    "), 1))
    process = start("--remote-python", python, folder.script(SCRIPT))
    running = await_ranks(folder, 4)
    dies.touch()
    os.kill(agent_of(running[2]), signal.SIGKILL)
    code, out, err = finish(process)
    assert code == 0, err
    assert not dies.exists()
    resumed(folder, out)


@pytest.mark.prove
def test_two_hosts_that_are_lost_come_back_one_after_the_other(lab, start, folder):
    process = start(folder.script(SCRIPT))
    agents = [agent_of(rank) for rank in await_ranks(folder, 4)[::2]]
    lab.crash("node1")  # with its sshd; its ranks were to hold the store
    os.kill(agents[1], signal.SIGKILL)
    heard = Heard(process)
    lost = [heard.until("is lost (") for _ in lab.names]
    assert ["node1" in lost[0], "node2" in lost[1]] == [True, True]
    lab.serve("node1")
    code, out, err = finish(process)
    assert code == 0, err
    resumed(folder, out)


@pytest.mark.prove
def test_a_task_that_srun_has_lost_is_started_again_as_the_run_says(folder, tmp_path_factory):
    script = folder.script(SCRIPT)
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as slurm, ExitStack() as ending:
        wait = ["-n", "2", "--restarts", "1", "--lost-host", "wait"]
        tasks = ["srun", "-N2", "-n2", f"--chdir={folder.path}", "--kill-on-bad-exit=0", "--wait=0"]
        process = slurm.start([*tasks, sys.executable, "-P", "-m", "samestep", "run", *wait, script])
        ending.callback(process.kill)
        await_ranks(folder, 4)
        ours = [pid for pid in slurm.pids() if "samestep run" in command_of(pid) and "srun" not in command_of(pid)]
        job = variable_of(ours[0], "SLURM_JOB_ID")
        os.kill(oldest([pid for pid in ours if variable_of(pid, "SLURM_PROCID") == "1"]), signal.SIGKILL)
        line = Heard(process).until("is lost")
        own, _, command = line.partition(" in its place: ")
        assert "for task 1 to come in" in own
        words = shlex.split(command)
        assert words[:2] == ["samestep", "run"]
        again = ["srun", f"--jobid={job}", "--overlap", "-N1", "-n1", "-w", "m2"]
        step = slurm.start([*again, f"--chdir={folder.path}", sys.executable, "-P", "-m", "samestep", *words[1:]])
        ending.callback(step.kill)
        _, out, err = finish(process)
        resumed(folder, out)
        assert "restart 1 of 1: all 4 ranks" in err
        finish(step)  # with 0, or ended by Slurm, for whom the job was over with its first step
    assert not list(folder.path.glob(".samestep-*"))


def variable_of(pid, name):
    told = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(word.split("=", 1) for word in told if "=" in word).get(name)


@pytest.mark.parametrize("choice", ["continue", "wait"])
def test_what_becomes_of_a_lost_host_needs_restarts(folder, choice, monkeypatch, capfd):
    monkeypatch.chdir(folder.path)
    assert main(["run", "-n", "2", "--lost-host", choice, folder.script("")]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.endswith(f"--lost-host {choice} is about what follows: say --restarts K, how often, as well")


def test_a_lost_host_ends_a_run_that_is_to_stop_and_says_what_else_could_be(lab, folder):
    words = ["--hosts", "node1,node2", *lab.reached, *FORKED, "-n", 2, "--restarts", 1]
    process = folder.start("--json", folder.json, *words, folder.script(SCRIPT), env=ONE_THREAD)
    running = await_ranks(folder, 4)
    os.kill(agent_of(running[2]), signal.SIGKILL)
    code, _, err = finish(process)
    assert code == 1
    assert "not started again: host node2 is lost, and --lost-host is stop" in err
    assert err.splitlines()[-1].endswith("/0/node2")


def test_slurm_is_told_to_bear_a_lost_task(folder, monkeypatch, capfd):
    monkeypatch.chdir(folder.path)
    words = ["--slurm", "--dry-run", "--nnodes", "2", "--restarts", "1", "--lost-host", "wait", "--join-timeout", "900"]
    assert main(["run", *words, folder.script("")]) == 0
    out = capfd.readouterr().out
    assert "--wait=0" in out
    assert "--lost-host wait --join-timeout 900" in out
