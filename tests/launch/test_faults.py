"""The fault table: whatever goes wrong, the right rank is named, all is gone within a bound, and nothing is left.

The bounds are those that users were promised, in seconds from the fault to the launcher's own end. They are generous
beside what is measured (docs/launching.md), so that a busy machine does not fail the tests.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_supervise import is_running, pids, wait_until_gone

from deadline import in_time

GRACE = 5.0


def seconds_since(folder):
    """Seconds from what the faulty rank wrote just before its fault until now."""
    return time.time() - float((folder.path / "fault").read_text())


FAULT = """
def fault():
    with open("fault", "w") as file:
        file.write(repr(time.time()))
"""


def test_a_native_crash_shows_the_python_line_it_came_from(folder):
    script = folder.script("def touch():\n    import ctypes\n    ctypes.string_at(0)\ntouch()")
    done = folder.run("-n", 2, script)
    line = (folder.path / script).read_text().splitlines().index("    ctypes.string_at(0)") + 1
    assert folder.result["failure"]["where"] == f"train.py:{line}"
    assert f"at train.py:{line}  ctypes.string_at(0)" in done.stderr
    assert "Fatal Python error: Segmentation fault" in folder.logs()["rank0.err"]


def test_a_rank_that_is_told_to_stop_does_not_begin_to_save(folder):
    script = folder.script("""
        signal.signal(signal.SIGTERM, lambda *_: (open(f"saved{rank}", "w").close(), sys.exit(0)))
        if rank == 1:
            raise ValueError("alone")
        time.sleep(600)
    """)
    done = folder.run("-n", 3, script)
    assert done.returncode == 1
    assert not list(folder.path.glob("saved*"))
    assert "ranks 0, 2 were at train.py:" in done.stderr
    assert "time.sleep(600)" in done.stderr


HOLD = """
def hold():
    import ctypes
    mutex = ctypes.create_string_buffer(64)
    ctypes.PyDLL(None).pthread_mutex_lock(mutex)
    ctypes.PyDLL(None).pthread_mutex_lock(mutex)  # waits for itself, in native code, and keeps the interpreter's lock
"""


def test_a_rank_in_native_code_is_stopped_and_its_line_told(folder):
    script = folder.script(HOLD + "if rank == 1:\n    time.sleep(0.5)\n    raise ValueError('alone')\nhold()")
    done = folder.run("-n", 2, script)
    assert (done.returncode, folder.result["failure"]["rank"]) == (1, 1)
    assert "rank 0 was at train.py:" in done.stderr
    assert "ctypes.PyDLL(None).pthread_mutex_lock(mutex)  # waits for itself" in done.stderr


def test_a_rank_that_ignores_every_order_is_killed_after_the_grace(folder):
    script = folder.script(f"""
        {FAULT.strip().replace(chr(10), chr(10) + "        ")}
        {HOLD.strip().replace(chr(10), chr(10) + "        ")}
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if rank == 1:
            time.sleep(0.5)
            fault()
            raise ValueError("alone")
        hold()
    """)
    assert folder.run("-n", 2, script).returncode == 1
    assert in_time(seconds_since(folder), GRACE + 1)


@pytest.mark.prove  # as a hang is ended: test_hanging_runs
def test_a_rank_that_is_frozen_is_cleaned_up(folder):
    script = folder.script("""
        if rank == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.5)
        raise ValueError("alone")
    """)
    done = folder.run("-n", 2, script)
    assert (done.returncode, folder.result["failure"]["rank"]) == (1, 1)


LEAVE = """
import subprocess
group = subprocess.Popen(["sleep", "600"])
daemon = subprocess.Popen(["sleep", "600"], start_new_session=True)
double = int(subprocess.run(["sh", "-c", "setsid sleep 600 >/dev/null 2>&1 & echo $!"], capture_output=True).stdout)
with open(f"pids{rank}.tmp", "w") as file:
    print(os.getpid(), group.pid, daemon.pid, double, file=file)
os.rename(f"pids{rank}.tmp", f"pids{rank}")
"""


@pytest.mark.parametrize("end", ["pass", "raise ValueError('no')", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_no_grandchild_is_left_whatever_session_it_went_to(folder, end):
    process = folder.start("-n", 2, folder.script(f"{LEAVE}\n{end}"))
    process.communicate(timeout=60)
    assert not any(map(is_running, pids(folder, 2)))


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_no_grandchild_outlives_a_launcher_that_was_killed(folder, start):
    process = folder.start("-n", 2, "--start", start, folder.script(LEAVE + "signal.pause()"))
    everything = pids(folder, 2)
    process.kill()
    process.communicate(timeout=60)
    wait_until_gone(everything)


def test_an_agent_that_was_killed_is_named_and_leaves_nothing(folder):
    process = folder.start("-n", 2, folder.script(LEAVE + "signal.pause()"))
    everything = pids(folder, 2)
    agent = int(Path(f"/proc/{everything[0]}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(agent, signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "is lost: its agent has ended" in err
    wait_until_gone(everything)


def test_two_runs_side_by_side_do_not_meet(folder):
    script = folder.script("join()\nprint(meet())")
    runs = [folder.start("-n", 2, script) for _ in range(2)]
    for run in runs:
        out, err = run.communicate(timeout=90)
        assert run.returncode == 0, err
        assert sorted(out.splitlines()) == ["[rank 0] 2", "[rank 1] 2"]


@pytest.mark.parametrize("ranks", [16, pytest.param(64, marks=pytest.mark.prove)])
def test_many_ranks_meet_and_a_failure_among_them_ends_them_all(folder, ranks):
    script = folder.script("join()\nprint(meet(), flush=True)\nif rank == 3:\n    raise ValueError('alone')\nmeet()")
    done = folder.run("-n", ranks, script)
    assert sorted(done.stdout.splitlines()) == sorted(f"[rank {rank}] {ranks}" for rank in range(ranks))
    assert (done.returncode, folder.result["failure"]["rank"]) == (1, 3)
    assert len(folder.result["failure"]["waiting"]) == ranks - 1


RESTART = """
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print("attempt", attempt, os.environ["TORCHELASTIC_MAX_RESTARTS"], flush=True)
join()
meet()
"""


def test_restarts_go_on_until_an_attempt_ends_well(folder):
    script = folder.script(RESTART + "if attempt < 2 and rank == 1:\n    os._exit(3)\nmeet()")
    done = folder.run("-n", 2, "--restarts", 5, script)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if "rank 1" in line] == [
        f"[rank 1] attempt {k} 5" for k in range(3)
    ]
    assert "restart 2 of 5" in done.stderr
    (record,) = folder.path.glob("runs/*/run.json")
    assert json.loads(record.read_text())["restarts"] == 2
    assert {path.name for path in record.parent.iterdir()} >= {"0", "1", "2"}
    events = [json.loads(line) for line in (record.parent / "events.jsonl").read_text().splitlines()]
    told = [(event["kind"], event["attempt"], event["ranks"]) for event in events]
    assert told == [("restart", 1, [1]), ("restart", 2, [1])]
    assert all("rank 1" in event["text"] for event in events)


def test_a_step_that_fails_three_times_is_not_tried_again(folder):
    script = folder.script(RESTART + "raise ValueError('always')")
    done = folder.run("-n", 2, "--restarts", 9, script)
    assert done.returncode == 1
    assert "not started again: 3 attempts in a row have failed before the first step" in done.stderr
    assert done.stdout.count("[rank 0] attempt") == 3


def test_a_usage_error_is_not_tried_again(folder):
    script = folder.script(RESTART + "from samestep.errors import UsageError\nraise UsageError('batch size 0')")
    done = folder.run("-n", 2, "--restarts", 3, script)
    assert done.returncode == 2
    assert "no restart: this error must be fixed first" in done.stderr


@pytest.mark.skipif(not Path("/sys/fs/cgroup").is_dir(), reason="no control groups here")
def test_a_rank_that_the_kernel_killed_for_memory_is_told_from_others(folder):
    group = _memory_group(folder)
    # both ranks sleep for longer than the test may take: the kernel ends rank 1, and the run then ends rank 0
    script = folder.script(
        "if rank == 1:\n    open('/proc/self/oom_score_adj', 'w').write('1000')  # the one to kill\n"
        "    hoard = bytearray(1 << 30)\n    hoard[::4096] = b'x' * (1 << 18)\ntime.sleep(600)"
    )
    command = [
        sys.executable,
        "-P",
        "-m",
        "samestep",
        "run",
        "-n",
        "2",
        "--start",
        "spawn",
        "--json",
        "result.json",
        script,
    ]
    enter = "import os, sys; open(sys.argv[1], 'w').write(str(os.getpid())); os.execv(sys.argv[2], sys.argv[2:])"
    try:
        done = subprocess.run(
            [sys.executable, "-c", enter, str(group / "cgroup.procs"), *command],
            cwd=folder.path,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        group.rmdir()
    assert done.returncode == 137, done.stderr
    assert "rank 1 of 2 failed: the kernel killed it: out of memory" in done.stderr


def _memory_group(folder):
    """A control group that may use 400 MB; skips where none can be made."""
    for root, limit in (
        (Path("/sys/fs/cgroup"), "memory.max"),
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
    ):
        group = root / f"samestep-test-{os.getpid()}"
        if not (root / limit).exists() and not (root / "cgroup.controllers").exists():
            continue
        try:
            group.mkdir()
            (group / limit).write_text(str(400 << 20))
        except OSError as error:
            if group.exists():
                group.rmdir()
            pytest.skip(f"no memory limit can be set here: {error}")
        return group
    pytest.skip("the memory controller is not mounted here")
