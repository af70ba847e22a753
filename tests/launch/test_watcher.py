"""Ranks that torchrun, mpiexec or a shell has started are watched over all the same, by one watcher a host."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryFile
from textwrap import dedent

import pytest

from ports import free_port
from samestep.launch.event_loop import Loop
from samestep.launch.link import Link
from samestep.launch.monitor.watcher import SILENT, ForeignRank, WatchedRanks, exit_code, last_lines
from samestep.launch.rank.control import RankProcess
from samestep.launch.rank.failure import FailureRecord
from samestep.launch.rank.user_code import STACKS_SIGNAL, place_in
from samestep.launch.result import RunResult

BIN = Path(sys.executable).parent
SCRIPT = """
import os, sys, time, torch.distributed as dist
{join}
    dist.barrier()
    if dist.get_rank() == 1:
        {fault}
    dist.barrier()
    os.write(1, b"done\\n")
"""
WORLD = "import samestep\nwith samestep.world() as world:"
OWN = "import samestep\ndist.init_process_group('gloo')\nif samestep.world():"

FAULTS = {
    "raises": ("raise KeyError('label')", "KeyError: 'label'", True),
    "leaves": ("sys.exit(3)", "it exited with code 3 without a Python exception", False),
    "killed": ("os.kill(os.getpid(), 9)", "it was killed by SIGKILL (signal 9)", False),
    "crashes": ("os.kill(os.getpid(), 11)", "it was killed by SIGSEGV (signal 11)", True),
    "early": ("os._exit(0)", "it ended with exit code 0 while others still waited for it", False),
}
# The launcher is the parent: where it takes a rank's exit code at once, nobody else ever knows it.
UNKNOWN = ("it ended without a word", "it ended, with a code that only its parent knows")


@pytest.fixture
def start(tmp_path):
    """Starts a script under another launcher; returns how that has ended."""

    def run(command, fault="pass", join=WORLD):
        done = subprocess.run(
            [*map(str, command), prepared(tmp_path, fault, join)],
            cwd=tmp_path,
            env=no_launcher(),
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
        return done.stdout, done.stderr, done.returncode

    return run


@pytest.fixture
def start_by_hand(tmp_path):
    """Starts some ranks of a script as a shell would; returns what they wrote and their exit codes."""

    def run(size, fault="pass", join=WORLD, **variables):
        script = prepared(tmp_path, fault, join)
        ours = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        reader, writer = os.pipe()  # the watcher holds it, too, and writes last
        with (tmp_path / "out").open("w") as out, os.fdopen(reader, encoding="utf-8") as err:
            ranks = []
            for rank in range(size):
                told = ours | {"RANK": rank, "LOCAL_RANK": rank} | variables
                environment = no_launcher() | {name: str(value) for name, value in told.items()}
                command = [sys.executable, script]
                ranks.append(subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=out, stderr=writer))
            os.close(writer)
            said = err.read()
            codes = [rank.wait(90) for rank in ranks]
        return (tmp_path / "out").read_text(), said, codes

    return run


def prepared(folder, fault, join):
    (folder / "train.py").write_text(SCRIPT.format(fault=fault, join=join))
    return "train.py"


def no_launcher():
    """This process's environment without what a launcher would have put there."""
    gone = ("PMI", "MPI", "GLOO", "OMP", "RANK", "WORLD_SIZE", "MASTER", "SAMESTEP", "TORCHELASTIC", "PYTHONUNB")
    return {name: value for name, value in os.environ.items() if not name.startswith(gone)}


def torchrun(ranks):
    return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", ranks]


def words(err):
    """Returns what the watcher said."""
    lines = err.splitlines()
    begun = [number for number, line in enumerate(lines) if line.startswith("samestep: error:")]
    return lines[begun[0] :] if len(begun) == 1 else begun


@pytest.mark.parametrize("fault", FAULTS)
def test_the_right_rank_is_named(start_by_hand, fault):
    _, err, codes = start_by_hand(3, FAULTS[fault][0])
    assert any(codes)
    assert_named(fault, err)


@pytest.mark.prove
@pytest.mark.parametrize("fault", FAULTS)
def test_under_torchrun_the_right_rank_is_named(start, fault):
    _, err, code = start(torchrun(3), FAULTS[fault][0])
    assert code != 0
    assert_named(fault, err)


def assert_named(fault, err):
    statement, message, has_line = FAULTS[fault]
    said = words(err)
    assert said[0].removeprefix("samestep: error: rank 1 of 3 failed: ").startswith((message, *UNKNOWN)), err
    assert (said[1].strip().endswith(statement)) == has_line
    assert any("ranks 0, 2 lost their connection to it" in line for line in said)


@pytest.mark.prove
def test_torchrun_starts_ranks_again_which_join_again_and_sees_the_one_that_failed_end_first(start):
    """A rank that lost its connection to a peer waits for the watcher's words before it leaves."""
    once = "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': raise KeyError('once')\n        os._exit(3)"
    _, err, _ = start([*torchrun(2), "--max-restarts", 1], once)
    first, second = (line for line in err.splitlines() if line.startswith("samestep: error:"))
    assert first == "samestep: error: rank 1 of 2 failed: KeyError: 'once'"
    assert second.removeprefix("samestep: error: rank 1 of 2 failed: ").startswith((FAULTS["leaves"][1], *UNKNOWN))
    root = err.partition("Root Cause")[2]
    assert "exitcode  : 3" in root
    assert "rank      : 1" in root


def test_where_nobody_fails_nothing_is_said(start_by_hand):
    out, err, codes = start_by_hand(2)
    assert (codes, out) == ([0, 0], "done\ndone\n"), err
    assert "samestep" not in err


def test_a_script_that_makes_its_own_group_is_watched_from_when_it_joins_the_world(start_by_hand):
    _, err, _ = start_by_hand(2, "raise KeyError('label')", OWN)
    assert words(err)[0] == "samestep: error: rank 1 of 2 failed: KeyError: 'label'", err


def test_one_watcher_serves_a_host(start_by_hand):
    """Each rank looks at the processes that it has started itself."""
    listed = "subprocess.getoutput(f'pgrep -f [m]onitor.watcher -P {os.getpid()}')"
    count = f"pass\n    import subprocess\n    os.write(1, b'watcher\\n' * len({listed}.split()))"
    out, err, codes = start_by_hand(2, count)
    assert (codes, out.count("watcher")) == ([0, 0], 1), err


@pytest.mark.skipif(not (BIN / "mpiexec").exists(), reason="no mpiexec beside this Python: pip install mpich has one")
@pytest.mark.prove  # test_mpiexec has a rank of a plain script that raises
@pytest.mark.parametrize("fault", ["killed", "raises", "early"])
def test_under_mpiexec_too_and_nobody_waits_for_the_dead(start, fault):
    _, err, _ = start([BIN / "mpiexec", "-n", 3, sys.executable], FAULTS[fault][0])
    said = words(err)[0].removeprefix("samestep: error: ")
    said = said.removeprefix("rank 1 of 3 failed: ")
    if fault == "killed":  # mpiexec kills the others within 1 ms
        said = re.sub(r"^(all 3 ranks|rank \d of 3) failed: ", "", said)
    at_once = "ranks 0-2 on host" if fault == "killed" else FAULTS[fault][1]
    assert said.startswith((FAULTS[fault][1], at_once, *UNKNOWN)), err


def test_a_rank_that_cannot_notice_is_ended_with_the_others(start_by_hand):
    script = "if dist.get_rank() == 0:\n        time.sleep(600)\n    if dist.get_rank() == 1:\n        raise KeyError"
    _, err, _ = start_by_hand(2, "pass\n    " + script)
    assert words(err)[0] == "samestep: error: rank 1 of 2 failed: KeyError", err
    assert "rank 0 was at" in err
    assert "time.sleep(600)" in err


def test_ranks_that_their_launcher_has_ended_all_at_once_are_not_blamed_one_by_one():
    silent = [failure(rank, exception="Exit", message=SILENT) for rank in range(2)]
    (line,) = last_lines(
        RunResult(exit_code=1, size=2, root_cause=silent[0], same_failure=(0, 1), failures=tuple(silent)), 2, "b"
    )
    assert line.startswith("samestep: error: ranks 0-1 on host b ended without a word, all at once")


def failure(rank, **other):
    told = {"pid": 1, "exception": "RuntimeError", "message": "Connection reset by peer", "exit_code": 1}
    return FailureRecord(rank=rank, **(told | other))


def verdict(*failures):
    return RunResult(exit_code=1, size=2, root_cause=failures[0], failures=failures)


def test_a_host_that_only_lost_a_peer_points_to_the_others():
    lost = verdict(*(failure(rank, lost_peer=True) for rank in (2, 3)))
    (line,) = last_lines(lost, 4, "b")
    assert line == "samestep: ranks 2-3 on host b lost their connection to a peer: its own host says why"
    assert "no rank reported a cause" in last_lines(lost, 2, "b")[0]  # there is no other host


@pytest.mark.parametrize("ended", [{"signal": 15}, {"signal": 2}, {"exception": "KeyboardInterrupt"}])
def test_a_run_that_somebody_has_ended_needs_no_explanation(ended):
    assert last_lines(verdict(failure(0, **ended)), 2, "b") == []


def test_the_exit_code_of_a_process_is_known_until_its_parent_has_taken_it():
    child = subprocess.Popen([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert exit_code(child.pid) == -9
    child.wait()
    assert exit_code(child.pid) is None
    assert exit_code(os.getpid()) is None


def test_a_rank_whose_threads_are_busy_writes_its_stacks_itself_as_often_as_asked():
    launcher, rank = socket.socketpair()
    with launcher, TemporaryFile() as stacks:
        code = dedent("""
            import json, sys, threading
            from samestep.launch.rank.control import Control

            def parse(text):
                while True:
                    json.loads(text)

            Control(int(sys.argv[1]), int(sys.argv[2])).start()
            threading.Thread(target=parse, args=("[[1, 2], {}]",), daemon=True).start()
            print(flush=True)
            parse('{"a": [1, 2, 3]}')
        """)
        kept = (rank.fileno(), stacks.fileno())
        command = [sys.executable, "-c", code, *map(str, kept)]
        with subprocess.Popen(command, pass_fds=kept, stdout=subprocess.PIPE) as child, rank:
            assert child.stdout is not None
            assert child.stdout.readline()
            one = RankProcess(0, child.pid, Link(launcher), stacks.fileno(), record=-1)
            for _ in range(300):
                one.pipe.send({"kind": "write_stacks"})
                text = ""
                while text.count("\n\n") < 2:  # each stack ends so
                    assert child.poll() is None
                    text += one.new_stacks().decode()
            child.kill()
    assert [line.partition(" 0x")[0] for line in text.splitlines() if " 0x" in line] == ["Main thread", "Thread"]
    assert '  File "<string>", line 12 in <module>\n\nThread' in text
    assert place_in(text.replace("<string>", "train.py"))[0] in {f"train.py:{line}" for line in (6, 7, 8)}  # of parse


@pytest.mark.parametrize("leaving", [False, True])
def test_a_rank_whose_interpreter_ends_is_not_asked_for_its_stacks(leaving):
    rank, watcher = socket.socketpair()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    handle = os.pidfd_open(child.pid)
    with rank, watcher, child, TemporaryFile() as stacks:
        one = ForeignRank(0, child.pid, handle, Link(watcher), stacks=stacks.fileno(), record=-1)
        one.leaving = leaving
        WatchedRanks(Loop(), [one]).command("dump_stacks", [0])
        child.communicate(b"\n")
    os.close(handle)
    assert child.returncode == (0 if leaving else -STACKS_SIGNAL)  # without faulthandler the signal ends a process
