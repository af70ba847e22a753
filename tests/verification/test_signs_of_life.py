"""When a run under observation counts as hung."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from samestep.launch.process import children, stat_of
from samestep.verification import runner, runs
from samestep.verification.files import Files
from samestep.verification.journal import TraceWriter

LOADS = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"


def test_a_rank_whose_worker_computes_has_not_hung(tmp_path: Path) -> None:
    journal = TraceWriter(tmp_path / "journals", 0)
    with subprocess.Popen([sys.executable, "-c", LOADS], start_new_session=True) as rank:
        try:
            journal.write("begin", rank=0, pid=rank.pid)
            while not (workers := children(rank.pid)):
                pass
            before = runs._Signs.of(tmp_path)
            while stat_of(workers[0])[1] < 1.0:
                pass
            assert runs._Signs.of(tmp_path).moved_since(before, 2.0)
        finally:
            for process in (*workers, rank.pid):
                subprocess.run(["kill", "-9", str(process)], check=True)


def test_a_rank_that_other_programs_leave_no_core_has_not_hung(tmp_path: Path) -> None:
    journal = TraceWriter(tmp_path / "journals", 0)
    core = min(os.sched_getaffinity(0))
    spin = f"import os; os.sched_setaffinity(0, [{core}]); os.nice(NICE); print(flush=True)\nwhile True: pass"
    commands = [[sys.executable, "-c", spin.replace("NICE", nice)] for nice in ("0", "19")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE) for command in commands]
    try:
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        rank = processes[1].pid
        journal.write("begin", rank=0, pid=rank)
        before, computed = runs._Signs.of(tmp_path), stat_of(rank)[1]
        while not (after := runs._Signs.of(tmp_path)).moved_since(before, 2.0):
            pass
        assert stat_of(rank)[1] - computed < (after.computed - before.computed) / 2
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_no_run_rounds_the_factors_of_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a script sets: cuBLAS and cuDNN read this when they are loaded. Seen on an H100."""
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert runs.shared_variables(1) == {"OMP_NUM_THREADS": "3", "NVIDIA_TF32_OVERRIDE": "0"}


def test_a_rank_that_reads_from_a_disk_has_not_hung() -> None:
    assert runs._Signs(100, 7.0, reads=True).moved_since(runs._Signs(100, 7.0), 50.0)


def test_only_processes_of_the_run_are_asked_for_their_stacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal ends a process that does not expect it: one that has got the number of a rank that has ended."""
    monkeypatch.setattr(runs, "_STACKS_S", 0.0)
    waits = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    starts = [sys.executable, "-c", f"import subprocess; subprocess.run({waits!r})"]
    with (
        subprocess.Popen(waits, stdin=subprocess.PIPE) as stranger,
        subprocess.Popen(starts, stdin=subprocess.PIPE) as launcher,
    ):
        while not (ranks := children(launcher.pid)):
            pass
        for rank, pid in enumerate((*ranks, stranger.pid)):
            TraceWriter(tmp_path / "journals", rank).write("begin", rank=rank, pid=pid)
        runs._ask_for_stacks(launcher.pid, tmp_path)
        assert launcher.wait(30) == 0  # the rank was asked, and ended by it
        assert stranger.poll() is None
        stranger.communicate()
    assert stranger.returncode == 0


def test_what_a_waiting_rank_computes_is_no_sign_of_life() -> None:
    before = runs._Signs(100, 7.0)
    assert not runs._Signs(100, 7.9).moved_since(before, 20.0)  # three threads that look about them
    assert runs._Signs(100, 10.0).moved_since(before, 20.0)  # a worker on a machine that has little time for it
    assert runs._Signs(101, 7.0).moved_since(before, 20.0)


def runner_in(folder: Path, say: Callable[[str], None] = print) -> runner.Runner:
    script, files = runs.Script(program="x.py"), Files([], folder)
    return runner.Runner(script=script, ranks=2, folder=folder, files=files, still_s=60.0, say=say)


def test_a_run_in_which_nothing_moves_is_told_of_every_ten_seconds(tmp_path: Path) -> None:
    said: list[str] = []
    progress = runner_in(tmp_path, said.append)._progress("recording 2 ranks")
    for still in (1.0, 9.9, 10.1, 10.3, 19.0, 20.2, 0.0, 10.2):
        progress(tmp_path, still)
    assert [line.partition(" for ")[2] for line in said] == [
        f"{seconds} s; 60 s count as a hang (--timeout)" for seconds in (10, 20, 10)
    ]


def test_the_processes_are_known_by_the_first_lines_of_their_journals(tmp_path: Path) -> None:
    folder = tmp_path / "journals"
    for rank, pid in ((0, 70), (1, 71)):
        journal = TraceWriter(folder, rank)
        journal.write("begin", rank=rank, pid=pid)
        journal.write("step", pid=5)
    TraceWriter(folder, 2)  # that has not written yet
    (folder / "rank3.jsonl").write_text('{"kind":"begin","pi', encoding="utf-8")
    assert sorted(runs.pids(tmp_path)) == [70, 71]


def test_a_signal_ends_runs_that_go_on_side_by_side(tmp_path: Path) -> None:
    """The one that hears of it waits for the other's thread, whose run might go on for an hour."""
    runner_ = runner_in(tmp_path)
    progress = runner_._progress("a run")

    def run(rank: int) -> Any:
        if rank == 0:
            raise KeyboardInterrupt
        while True:  # as a run does until it is over; the test's own deadline ends this
            progress(tmp_path, 0.0)

    with pytest.raises(KeyboardInterrupt):
        runner_.side_by_side(run, [0, 1])
