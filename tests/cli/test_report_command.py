"""`samestep report` as a user types it: on made runs, on a real one, and on what is none."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from reporting.made_runs import OWN, Made
from samestep.cli import main


def report(*arguments, cwd=None, **options):
    command = [sys.executable, "-P", "-m", "samestep", "report", *map(str, arguments)]
    options = {"capture_output": True, "text": True, "timeout": 120} | options
    return subprocess.run(command, cwd=cwd, check=False, **options)


def refused(done):
    """Returns the one line that a usage error is."""
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    return line


def test_the_page_lies_in_the_run_directory_and_the_summary_on_the_terminal(tmp_path):
    made = Made(tmp_path / "run", ranks=4, own=lambda rank, step: OWN | {"backward": 12_000 if rank == 2 else 8_000})
    done = report(made.write())
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert said[0].startswith("train.py --lr 0.1, ")
    assert said[1] == "train.py, 4 ranks on node0: 20 steps in 440 ms."
    assert said[-1] == str(tmp_path / "run" / "report.html")
    assert "  Nothing was checked: `samestep verify -n 4 train.py --lr 0.1` says whether N ranks train as one." in said
    assert any(
        "Rank 2 on node0 is a straggler: it is busy for" in line and "up to 18 % less time" in line for line in said
    )
    assert (tmp_path / "run" / "report.html").read_text().startswith("<!DOCTYPE html>")


@pytest.mark.parametrize("columns", [60, 100])
def test_a_terminal_is_shown_whole_words_and_no_line_beyond_its_width(tmp_path, capsys, monkeypatch, columns):
    path = Made(tmp_path, ranks=4, own=lambda rank, step: OWN | {"backward": 12_000 if rank == 2 else 8_000}).write()
    assert main(["report", str(path), "-o", str(tmp_path / "page.html")]) == 0
    plain = capsys.readouterr().out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["report", str(path), "-o", str(tmp_path / "page.html")]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, plain.splitlines())) > columns
    assert max(map(len, shown.splitlines()[:-1])) <= columns
    assert shown.split() == plain.split()
    assert any(line.startswith("    ") for line in shown.splitlines())


def test_the_newest_run_is_reported_where_none_is_named(tmp_path):
    for name, moment in (("first", 3), ("last", 9), ("between", 5)):
        run = Made(tmp_path / "runs" / name).write()
        os.utime(run / "run.json", (moment, moment))
    assert report(cwd=tmp_path).stdout.splitlines()[-1] == "runs/last/report.html"
    assert "there is no run in ./runs" in refused(report(cwd=tmp_path / "runs"))


def test_page_trace_and_data_go_where_they_are_wanted(tmp_path):
    run = Made(tmp_path / "run").write()
    before = sorted(file.name for file in run.iterdir())
    options = [
        "--output",
        tmp_path / "a" / "page.html",
        "--trace",
        tmp_path / "trace.json",
        "--json",
        tmp_path / "data.json",
    ]
    assert report(run, *options).returncode == 0
    assert (tmp_path / "a" / "page.html").exists()
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    told = json.loads((tmp_path / "data.json").read_text())
    assert told["step"]["mean"] == pytest.approx(0.018)
    assert told["same"] == {"verdict": "unchecked", "command": "samestep verify -n 2 train.py --lr 0.1"}
    assert sorted(file.name for file in run.iterdir()) == before


def test_the_documented_keys_are_those_that_are_written(tmp_path):
    run = Made(tmp_path / "run", values=lambda rank, step: {"loss": 1.0}).write()
    report(run, "--json", tmp_path / "data.json")
    told = json.loads((tmp_path / "data.json").read_text())
    page = (Path(__file__).parents[2] / "docs" / "reporting.md").read_text()
    documented = set(re.findall(r"^\| `(\w+)` \|", page.partition("## Data")[2].partition("\n## ")[0], re.MULTILINE))
    assert documented == set(told)


def test_data_never_holds_a_number_that_json_does_not_know(tmp_path):
    made = Made(tmp_path / "run", values=lambda rank, step: {"loss": "inf"}, about={"exit": math.nan})
    done = report(made.write(), "--json", tmp_path / "data.json")
    assert done.returncode == 0, done.stderr
    json.loads((tmp_path / "data.json").read_text(), parse_constant=pytest.fail)


def test_lines_that_are_torn_or_newer_are_told_and_left_out(tmp_path):
    made = Made(tmp_path / "run")
    run = made.write()
    with made.file(1).open("a") as file:
        file.write('{"v": 99, "kind": "dream"}\n{"v": 1, "kind": "step", "st\n\x00\xff\n[1, 2]\n{"v": 1, "t": 1')
    done = report(run)
    assert done.returncode == 0, done.stderr
    assert "note: rank1.events.jsonl: 3 lines that are no events were left out" in done.stdout
    assert "note: rank1.events.jsonl has lines of version 99: a later samestep wrote them" in done.stdout


def test_what_a_terminal_would_obey_is_not_printed(tmp_path):
    made = Made(tmp_path / "run\x1b[31m", about={"command": ["\x1b]0;title\x07\x1b[2J"]}, begin={"host": "\x9b2J"})
    run = made.write()
    with made.file(0).open("a") as file:
        file.write("no event\n")
    done = report(run)
    assert done.returncode == 0, done.stderr
    assert all(line.isprintable() for line in done.stdout.splitlines())


@pytest.mark.parametrize("attempt", [0, 1])
def test_an_attempt_can_be_chosen(tmp_path, attempt):
    for number in range(2):
        Made(tmp_path, attempt=number, steps=5 + number).write()
    assert f"{5 + attempt} steps" in report(tmp_path, "--attempt", attempt).stdout


def test_a_run_that_is_still_running_is_shown_as_far_as_it_is(tmp_path):
    made = Made(tmp_path, ended=lambda rank: False, about={"ended": None, "exit": None})
    assert "It is still running" in report(made.write()).stdout


def test_what_is_no_run_is_refused_in_one_line(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "run.json").write_text('{"command": ["tr')
    assert "there is no run directory" in refused(report(tmp_path / "none"))
    assert "is no run directory" in refused(report(tmp_path / "empty"))
    assert "is no run directory" in refused(report(tmp_path / "half"))
    assert "is a file" in refused(report(tmp_path / "file"))
    assert "there is no run directory" in refused(report(tmp_path / "a\x1b[31m\nb"))


def test_what_cannot_be_written_is_refused_before_anything_else_is(tmp_path):
    run = Made(tmp_path / "run").write()
    assert "is a directory" in refused(report(run, "-o", tmp_path))
    assert "is named twice" in refused(report(run, "--json", run / "report.html"))
    assert "cannot be written: File name too long" in refused(report("a" * 300))
    (tmp_path / "file").write_text("")
    assert "cannot be written" in refused(report(run, "-o", tmp_path / "file" / "page.html"))


def test_attempts_and_options_that_are_none_are_refused(tmp_path):
    run = Made(tmp_path / "run").write()
    assert "there is no attempt 3 of this run; its only one is 0" in refused(report(run, "--attempt", 3))
    assert "did you mean --trace?" in refused(report(run, "--trance", "x"))


def test_the_help_has_examples():
    done = report("--help")
    assert done.returncode == 0
    assert "ui.perfetto.dev" in done.stdout


def test_a_real_run_of_a_script_that_knows_nothing_of_us(tmp_path):
    (tmp_path / "train.py").write_text(
        textwrap.dedent("""
            import torch, torch.distributed as dist
            from torch.nn.parallel import DistributedDataParallel
            dist.init_process_group("gloo")
            torch.manual_seed(0)
            model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 1)))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            for _ in range(30):
                model(torch.randn(8, 64)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                dist.all_reduce(torch.ones(1))
            dist.destroy_process_group()
        """)
    )
    command = [sys.executable, "-P", "-m", "samestep", "run", "-n", "2", "--run-dir", "out", "train.py"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    done = report("out", "--json", "data.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = json.loads((tmp_path / "data.json").read_text())
    assert (told["state"], told["ranks"], told["steps"]) == ("ended", 2, 30)
    assert set(told["step"]["phases"]) >= {"forward", "backward", "optimizer", "collective"}
    share = sum(told["step"]["phases"].values()) / told["step"]["mean"]
    assert share == pytest.approx(1)
    assert told["communication"]["calls"][0]["where"].endswith("train.py:12")
    assert told["communication"]["hidden"] is None
    assert "does not report them: values (world.log) and shares of the work (samestep.shards)" in done.stdout
