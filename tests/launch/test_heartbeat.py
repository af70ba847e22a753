"""How a rank is, seen from outside: a process of the test's own that moves, computes, sleeps or is stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from samestep import progress
from samestep.launch.event_loop import Loop
from samestep.launch.monitor import heartbeat

OWN = os.getpid()


class Looks:
    """Looks at one process, when told to."""

    def __init__(self, pid: int, record: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.told: list[tuple[str, dict[str, object]]] = []
        self._ahead, self._patch = 0.0, monkeypatch
        self._clock = time.monotonic
        loop = Loop()
        self._loop = loop
        ranks = lambda: {3: (pid, progress.read(record))}  # noqa: E731
        heartbeat.HeartbeatMonitor(loop, ranks, lambda kind, body: self.told.append((kind, body)))

    def later(self, seconds: float) -> dict[str, object]:
        """Looks again when so many seconds have passed; returns what is told last."""
        self._ahead += seconds
        self._patch.setattr(time, "monotonic", lambda: self._clock() + self._ahead)
        self.told.clear()
        self._loop.turn(0.0)
        return self.told[-1][1] if self.told else {}


def test_who_stands_still_is_told_and_who_moves_again(record: int, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Looks(OWN, record, monkeypatch)
    assert looks.later(0.5) == {}
    told = looks.later(2.0)
    assert (told["rank"], told["pid"], told["operation"], told["since_progress"]) == (
        3,
        OWN,
        "",
        pytest.approx(2.0, abs=0.6),
    )
    progress.enter_collective("barrier", "train.py:4")
    assert looks.later(1.1)["since_progress"] == 0.0
    assert looks.later(0.1) == {}
    told = looks.later(2.0)
    assert (told["operation"], told["site"], told["entered"]) == ("barrier", "train.py:4", 1)


def test_steps_are_told_with_where_their_time_has_gone(record: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sleeps are the time that must be found again; nothing is waited for."""
    looks, began = Looks(OWN, record, monkeypatch), time.monotonic()
    progress.set_phase("data")
    time.sleep(0.02)
    progress.set_phase("train")
    progress.enter_collective("all_reduce", "train.py:4")
    time.sleep(0.03)
    progress.exit_collective()
    with progress.phase("evaluate"):
        progress.enter_collective("all_reduce", "train.py:9")
        time.sleep(0.04)
        progress.exit_collective()
    progress.gradients_ready()
    time.sleep(0.05)
    progress.backward_done()
    progress.backward_done()  # one that this rank had no part in
    progress.count_step()
    whole = time.monotonic() - began
    looks.later(1.1)
    (told,) = [body for kind, body in looks.told if kind == "step_timing"]
    assert (told["rank"], told["step"]) == (3, 1)
    assert told["data"] >= 0.02
    assert told["non_training"] >= 0.04  # the collective in it is no other time
    assert told["waited"] >= 0.08
    assert told["data"] + told["non_training"] + told["waited"] <= whole


def test_after_a_sleep_of_the_whole_machine_nobody_has_stood_still(
    record: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = Looks(OWN, record, monkeypatch)
    assert looks.later(2.0)["since_progress"] == pytest.approx(2.0, abs=0.6)
    assert looks.later(3600.0)["since_progress"] == 0.0


def test_the_kernel_tells_who_is_stopped_and_who_computes(record: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for program, state, idle in (("while True: pass", "R", 0.0), ("input()", "S", 2.0)):
        command = [sys.executable, "-c", f"print(flush=True)\n{program}"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            process.stdout.readline()
            looks = Looks(process.pid, record, monkeypatch)
            time.sleep(1.0)  # of computing, or of none: what a look a second later compares
            told = looks.later(1.0)
            assert (told["state"], told["since_activity"]) == (state, pytest.approx(idle, abs=0.6))
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
            assert looks.later(1.0)["state"] == "T"
            process.kill()
        monkeypatch.undo()
