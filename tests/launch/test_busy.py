"""Cores that others keep busy are counted over a moment, and a benchmark says so before it begins."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from samestep.cli.checks import warn_of_others
from samestep.launch.resources import busy_cores


def test_time_that_is_not_idle_is_counted_by_core(tmp_path, monkeypatch):
    stat = tmp_path / "proc" / "stat"
    stat.parent.mkdir()
    stat.write_text("cpu  0 0 0 0\ncpu0 10 0 0 80 10 0 0 0 0 0\ncpu1 50 0 0 50 0 0 0 0 0 0\nintr 7\n")
    later = "cpu  0 0 0 0\ncpu0 11 1 1 85 11 0 0 1 0 0\ncpu1 60 0 0 50 0 0 0 0 0 0\nintr 8\n"
    monkeypatch.setattr(time, "sleep", lambda seconds: stat.write_text(later))
    assert busy_cores([0], root=tmp_path) == pytest.approx(4 / 10)
    stat.write_text("cpu1 50 0 0 50 0 0 0 0 0 0\n")
    assert busy_cores([0, 1, 7], root=tmp_path) == 1.0
    assert busy_cores([0], root=tmp_path / "nowhere") == 0


def test_a_core_that_another_process_computes_on_is_told_of(capsys):
    core = min(os.sched_getaffinity(0))
    command = f"import os; os.sched_setaffinity(0, {{{core}}}); print(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", command], stdout=subprocess.PIPE) as busy:
        busy.stdout.readline()
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {core})
        try:
            warn_of_others()
        finally:
            os.sched_setaffinity(0, before)
            busy.kill()
    assert "% of the cores busy: what is measured now is slower" in capsys.readouterr().err
