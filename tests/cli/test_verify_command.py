"""`samestep verify` that is told to end, or killed: nothing that it has started goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from samestep.collectives.memory import is_running

STAYS = """
import os, pathlib, time, torch.distributed as dist
dist.init_process_group("gloo")
there = pathlib.Path(__file__).with_name(f"rank{dist.get_rank()}")
there.with_suffix(".new").write_text(f"{os.getpid()} {os.getppid()}")
there.with_suffix(".new").rename(there)
time.sleep(600)  # it is ended long before
"""


@pytest.fixture
def started(tmp_path):
    """A verification in its first run, its processes, and the folder for what is temporary."""
    (tmp_path / "stays.py").write_text(STAYS)
    (tmp_path / "temporary").mkdir()
    verify = subprocess.Popen(
        [sys.executable, "-m", "samestep", "verify", str(tmp_path / "stays.py")],
        env={**os.environ, "TMPDIR": str(tmp_path / "temporary")},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    ranks = [tmp_path / f"rank{rank}" for rank in range(2)]
    while not all(file.exists() for file in ranks):  # the test's own deadline ends this
        assert verify.poll() is None
        time.sleep(0.05)
    yield verify, [int(pid) for file in ranks for pid in file.read_text().split()], tmp_path / "temporary"
    verify.kill()
    verify.wait()
    verify.stderr.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_what_runs_and_removes_what_it_has_left(started, number):
    verify, processes, temporary = started
    assert list(temporary.iterdir())
    verify.send_signal(number)
    said = verify.communicate()[1]
    assert verify.returncode == 128 + number
    assert said.splitlines()[-1] == (
        f"samestep: {number.name} has ended the verification before its verdict; what it had started has ended too"
    )
    assert [pid for pid in processes if is_running(pid)] == []
    assert list(temporary.glob("samestep-verify-*")) == []


def test_what_runs_ends_with_a_verification_that_is_killed(started):
    verify, processes, _ = started
    verify.kill()
    while any(map(is_running, processes)):  # the test's own deadline ends this
        time.sleep(0.05)
