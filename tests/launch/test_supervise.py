"""The rank that failed is named and its code returned, the others are stopped, and nothing is left running."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from deadline import in_time

FAILURES = {
    "raises": ("raise KeyError('no such label')", 1, "KeyError", None),
    "exits with a code": ("sys.exit(7)", 7, "SystemExit", None),
    "exits with a message": ("sys.exit('no data')", 1, "SystemExit", None),
    "vanishes": ("os._exit(9)", 9, "Exit", None),
    "is killed": ("os.kill(os.getpid(), signal.SIGKILL)", 137, "Signal", 9),
    "crashes": ("import ctypes; ctypes.string_at(0)", 139, "Signal", 11),
    "aborts": ("os.abort()", 134, "Signal", 6),
    "ends early": ("sys.exit(0)", 1, "EarlyExit", None),
    "vanishes early": ("os._exit(0)", 1, "EarlyExit", None),
}
GONE = 3.0  # seconds from the first failure to the launcher's own end, as users were promised


# Of ranks in fresh interpreters, which import torch, in `make prove`.
ROWS = [(name, "fork") for name in FAILURES]
ROWS += [pytest.param(name, "spawn", marks=pytest.mark.prove) for name in FAILURES]


@pytest.mark.parametrize(("what", "start"), ROWS)
def test_the_rank_that_fails_is_blamed_and_all_are_gone_soon(folder, what, start):
    statement, code, exception, number = FAILURES[what]
    script = folder.script(f"""
        join()
        meet()
        if rank == 1:
            with open("fault", "w") as file:
                file.write(repr(time.time()))
            {statement}
        meet()
        time.sleep(600)
    """)
    done = folder.run("-n", 3, "--start", start, script)
    assert in_time(time.time() - float((folder.path / "fault").read_text()), GONE)
    failure = folder.result["failure"]
    assert done.returncode == folder.result["exit"] == code, done.stderr
    assert (failure["rank"], failure["exception"], failure["signal"]) == (1, exception, number)
    assert failure["waiting"] == [0, 2]
    assert "rank 1 of 3 failed" in done.stderr
    assert "ranks 0, 2 lost their connection to it" in done.stderr
    assert done.stderr.rstrip().splitlines()[-1].strip().startswith("logs: runs/train-")


def test_the_line_of_the_rank_that_failed_is_shown_with_its_traceback_alone(folder):
    script = folder.script("join()\nif rank == 1:\n    [].index('needle')\nmeet()")
    done = folder.run("-n", 2, script)
    place = f"train.py:{len(Path(folder.path / script).read_text().splitlines()) - 1}"
    assert folder.result["failure"]["where"] == place
    assert f"at {place}  [].index('needle')" in done.stderr
    assert done.stderr.count("Traceback") == 1
    assert "bootstrap" not in done.stderr
    assert "rank 0] lost its connection to other ranks at train.py" in done.stderr
    assert "all_reduce" in json.loads(folder.logs()["rank0.error.json"])["traceback"]


def test_a_rank_that_lost_its_peer_stood_where_it_was_told_and_not_at_its_exit(folder):
    script = folder.script("""
        import atexit
        atexit.register(time.sleep, 8)
        join()
        meet()  # rank 0 is in no other function than this one when rank 1 fails
        if rank == 1:
            atexit.unregister(time.sleep)
            raise ValueError
        meet()
    """)
    done = folder.run("-n", 2, script)
    (line,) = [line for line in done.stderr.splitlines() if "rank 0 was at" in line]
    assert "all_reduce" in line


TRAINS = """
import torch
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2, 2).requires_grad_())], lr=0.1)
for _ in range(3):
    optimizer.step()
"""


def test_ranks_that_train_and_never_meet_are_told_so(folder):
    done = folder.run("-n", 2, folder.script(TRAINS))
    assert done.returncode == 0, done.stderr
    told = "samestep: note: the 2 ranks took 3 steps and joined no process group: each has trained a model of its own"
    assert done.stderr.count(told) == done.stderr.count("joined no process group") == 1


def test_an_error_inside_a_library_is_placed_at_the_users_line(folder):
    script = folder.script("import json\njson.loads('{')")
    folder.run(script)
    assert folder.result["failure"]["exception"] == "JSONDecodeError"
    assert folder.result["failure"]["where"].startswith("train.py:")


def test_a_syntax_error_is_placed_in_the_script(folder):
    script = folder.script("x = = 1")
    folder.run(script)
    assert folder.result["failure"]["where"].startswith("train.py:")


def test_a_usage_error_that_all_ranks_raise_is_shown_once(folder):
    script = folder.script("""
        from samestep.errors import DataError
        raise DataError("batch size 1 is smaller than the world of 2: ask for 2 or more")
    """)
    done = folder.run("-n", 2, script)
    assert done.returncode == 2
    assert done.stderr.count("samestep: error: batch size 1 is smaller") == 1
    assert "Traceback" not in done.stderr
    assert "rank 1 failed the same way" in done.stderr


def test_an_error_that_all_ranks_raise_is_nobodys_own(folder):
    done = folder.run("-n", 3, folder.script("raise ValueError('everywhere')"))
    assert "all 3 ranks failed: ValueError: everywhere" in done.stderr
    assert folder.result["failure"]["waiting"] == []


STAY = """
import subprocess
child = subprocess.Popen(["sleep", "600"])
with open(f"pids{rank}.tmp", "w") as file:
    print(os.getpid(), child.pid, file=file)
os.rename(f"pids{rank}.tmp", f"pids{rank}")
"""


def pids(folder, ranks):
    """Waits until every rank has written its process and its child's, and returns them."""
    files = [folder.path / f"pids{rank}" for rank in range(ranks)]
    while not all(file.exists() for file in files):
        time.sleep(0.02)
    return [int(pid) for file in files for pid in file.read_text().split()]


def is_running(pid):
    """Tells whether a process runs; a zombie that nobody has reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(processes):
    while any(map(is_running, processes)):  # the test's own deadline ends this
        time.sleep(0.02)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_every_rank_and_what_it_started(folder, number, code):
    process = folder.start("-n", 2, folder.script(STAY + "signal.pause()"))
    started = pids(folder, 2)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert f"interrupted by {signal.Signals(number).name}: all 2 ranks have ended" in err
    assert "Traceback" not in err
    assert not any(map(is_running, started))


def test_ranks_may_end_in_their_own_way_after_a_signal(folder):
    script = folder.script(
        "signal.signal(signal.SIGTERM, lambda *_: (print('saved'), sys.exit(0)))" + STAY + "signal.pause()"
    )
    process = folder.start("-n", 2, script)
    pids(folder, 2)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out.count("saved")) == (0, 2)


def test_a_second_signal_does_not_wait(folder):
    script = folder.script("signal.signal(signal.SIGINT, signal.SIG_IGN)" + STAY + "while True:\n    signal.pause()")
    process = folder.start("-n", 2, script)
    started = pids(folder, 2)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode in {130, 143}  # the kernel may deliver either first
    assert not any(map(is_running, started))
