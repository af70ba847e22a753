"""`samestep bench` as a user meets it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from samestep.bench import step
from samestep.bench.harness import Comparison, Options, Report
from samestep.cli import bench
from samestep.errors import UsageError


@pytest.fixture
def asked(monkeypatch):
    """Replaces the benchmarks by one that only remembers how it was asked."""
    seen = []

    def run(options):
        seen.append(options)
        return Report("step", [Comparison("a / b", "step", (0.001, 0.003), (0.001, 0.002), 1.02)], {"ranks": 2})

    monkeypatch.setattr(bench, "load", lambda name: run)
    return seen


def test_the_table_shows_medians_and_the_verdict(asked, capsys):
    assert bench.main(["step"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "ours │ 2.00 │ 1.00 │ 3.00" in shown
    assert "overhead +25.0 %, 95 % interval +0.0 % to +50.0 %; target: at most +2.0 %:" in shown
    assert "inconclusive, take more --repeats" in shown


def test_ranks_and_repeats_reach_the_benchmark(asked, capsys):
    bench.main(["step", "-n", "3", "--repeats", "7"])
    bench.main(["step"])
    assert asked == [Options(ranks=3, repeats=7), Options(repeats=150)]


def test_json_goes_to_the_named_file(asked, capsys, tmp_path):
    bench.main(["step", "--json", str(tmp_path / "step.json")])
    assert json.loads((tmp_path / "step.json").read_text())["comparisons"][0]["kept"] is None


@pytest.mark.parametrize(("name", "option"), [("step", "--json"), ("links", "--write"), ("allreduce", "--plot")])
def test_a_file_that_cannot_be_written_is_told_before_anything_is_measured(asked, tmp_path, name, option):
    with pytest.raises(UsageError, match=f"{option} .*/nowhere/file cannot be written: there is no directory"):
        bench.main([name, option, str(tmp_path / "nowhere" / "file")])
    assert asked == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "there is no benchmark 'nothing'"),
        (["step", "-n", "two"], "'two' is not a number of processes; give 1 or more"),
        (["step", "-n", "0"], "'0' is not a number of processes"),
        (["step", "--repeats", "1"], "'1' is not a number of pairs; give 2 or more"),
        ([], "NAME"),
    ],
)
def test_a_mistake_is_one_line_that_says_what_to_give(arguments, message):
    with pytest.raises(UsageError, match=message):
        bench.main(arguments)


def test_one_that_starts_ranks_of_its_own_is_refused_to_ranks(asked, monkeypatch):
    monkeypatch.setattr(bench, "read_rank_variables", lambda: SimpleNamespace(rank=0, size=2))
    with pytest.raises(UsageError, match="bench step starts ranks of its own, and 2 of it would disturb each other"):
        bench.main(["step"])
    assert asked == []
    assert bench.main(["compress"]) == 0


def test_help_lists_the_benchmarks_without_importing_torch():
    code = "import sys; from samestep.cli import bench; print(bench._parser().format_help(), 'torch' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "  step        a training step against a hand-written" in shown
    assert "examples:" in shown
    assert shown.strip().endswith("False")


def test_the_real_thing_runs_on_two_processes(tmp_path, capsys, two_ranks, monkeypatch):
    monkeypatch.setattr(step, "spawn", lambda function, n, *args, progress: two_ranks(function, *args))
    small = replace(step.MLP, batch=4, samples=256)
    monkeypatch.setattr(step, "MLP", small)
    monkeypatch.setattr(step, "FASTER", ((small, step.FASTER[1][1]),))
    monkeypatch.setattr(step, "installed_peers", list)  # no other library
    monkeypatch.setattr(step, "SETS", 1)  # of processes
    assert bench.main(["step", "--repeats", "2", "--json", str(tmp_path / "step.json")]) == 0
    told = json.loads((tmp_path / "step.json").read_text())
    assert told["setting"]["ranks"] == 2
    assert [len(one["ours"]["times"]) for one in told["comparisons"]] == [2, 2]
    assert capsys.readouterr().out.count("95 % interval") == 2  # which of the loops is faster is no part of this test
