"""What options and exit codes of the commands do, where no test of a part of samestep shows it."""

from __future__ import annotations

import json
import signal

import pytest
import torch

import samestep
from samestep.bench import allreduce, step
from samestep.bench.harness import Report
from samestep.cli import COMMANDS, main
from samestep.network.cluster import load
from samestep.planning import measure_cluster
from samestep.verification import verify
from samestep.verification.pages import PAGES


@pytest.fixture
def script(tmp_path):
    """A script, which nothing here starts."""
    (tmp_path / "train.py").touch()
    return str(tmp_path / "train.py")


# --- verify -------------------------------------------------------------------------------------------


def test_the_timeout_of_verify_is_the_time_without_a_sign_of_life(script, monkeypatch):
    given = {}

    def examine(program, ranks, **options):
        given.update(options)
        raise KeyboardInterrupt

    monkeypatch.setattr(verify, "examine", examine)
    assert main(["verify", "--timeout", "7.5", script]) == 130
    assert given["still_s"] == 7.5


@pytest.mark.parametrize("code", PAGES)
def test_a_finding_is_explained(capsys, code):
    assert main(["verify", "--explain", code.upper()]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for part in (code, PAGES[code].title, PAGES[code].why, PAGES[code].fix, PAGES[code].seen):
        assert " ".join(part.split()) in said


def test_an_error_is_explained(capsys):
    assert main(["verify", "--explain", "StepError"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("StepError: The calls of one training step do not fit together.")
    assert "exit code: 1" in said


# --- watch --------------------------------------------------------------------------------------------


def test_the_output_of_the_rank_that_was_asked_for_is_shown(tmp_path, capsys):
    (tmp_path / "0" / "node").mkdir(parents=True)
    (tmp_path / "run.json").write_text(json.dumps({"command": ["train.py"], "ranks": 2, "ended": 2e9, "exit": 0}))
    for rank in (0, 1):
        begin = {"kind": "begin", "step": 0, "host": "node", "pid": 1, "size": 2, "python": "3.11"}
        line = {"v": 1, "t": 1.9e9, "rank": rank, "attempt": 0} | begin
        (tmp_path / f"0/node/rank{rank}.events.jsonl").write_text(json.dumps(line) + "\n")
        (tmp_path / f"0/node/rank{rank}.out").write_text(f"said by {rank}\n")
    for rank in (0, 1):
        assert main(["watch", str(tmp_path), "--once", "--rank", str(rank)]) == 0
        shown = capsys.readouterr().out
        assert [one for one in (0, 1) if f"said by {one}" in shown] == [rank]


# --- checkpoint ---------------------------------------------------------------------------------------


def test_a_checkpoint_is_converted_to_the_format_that_was_asked_for(tmp_path, capsys):
    model = torch.nn.Linear(2, 1)
    with samestep.world(device="cpu") as world:
        state = samestep.checkpoint(tmp_path / "run", world, model=model)
        state.save()
        state.close()
    assert main(["checkpoint", "convert", str(tmp_path / "run"), str(tmp_path / "weights"), "--to", "pt"]) == 0
    saved = torch.load(tmp_path / "weights", weights_only=True)
    assert saved["model"]["weight"].tolist() == model.weight.tolist()


# --- bench --------------------------------------------------------------------------------------------


def test_a_benchmark_runs_on_as_many_ranks_as_asked_for(monkeypatch):
    asked = []

    def spawn(function, n, *args, **options):
        asked.append(n)
        raise KeyboardInterrupt

    monkeypatch.setattr(step, "spawn", spawn)
    monkeypatch.setattr(step, "installed_peers", list)  # no other library
    assert main(["bench", "step", "-n", "3", "--repeats", "2"]) == 130
    assert asked == [3]


CLUSTER = '[nodes]\ncount = 1\ndevices = 2\n[links]\ninside = { latency = "5 us", bandwidth = "10 GB/s" }\n'


def test_links_are_written_as_a_cluster_file(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        measure_cluster, "run", lambda _: Report("links", [], {"ranks": 2}, file=CLUSTER, conclusion="found")
    )
    assert main(["bench", "links", "--write", str(tmp_path / "mine.toml")]) == 0
    assert load(tmp_path / "mine.toml").devices == 2
    assert f"samestep plan --cluster {tmp_path / 'mine.toml'} train.py" in capsys.readouterr().out


def test_bandwidths_are_drawn(tmp_path, monkeypatch, capsys):
    pytest.importorskip("plotly")
    curves = {"registered": [(1024, 1e9), (4096, 2e9)], "gloo": [(1024, 1e8), (4096, 2e8)]}
    report = Report("allreduce", [], {"ranks": 2}, curves=curves, conclusion="found")
    monkeypatch.setattr(allreduce, "run", lambda _: report)
    assert main(["bench", "allreduce", "--plot", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert all(f'"name":"{name}"' in page for name in curves)


# --- Ctrl-C -------------------------------------------------------------------------------------------

AT_WORK = {  # command -> where it is interrupted, and its arguments
    "doctor": ("samestep.doctor.checks.run_checks", []),
    "checkpoint": ("samestep.cli.checkpoint.list_checkpoints", ["list", "."]),
    "plan": ("samestep.network.cluster.load", ["--profile", "any.json", "--cluster", "any.toml"]),
    "report": ("samestep.reporting.run_log.open_run", ["."]),
    "bench": ("samestep.cli.bench.load", ["step"]),
    "verify": ("samestep.verification.verify.examine", []),  # and the script
}


@pytest.mark.parametrize("command", AT_WORK)
def test_ctrl_c_is_exit_code_130(script, monkeypatch, command):
    place, arguments = AT_WORK[command]
    monkeypatch.setattr(place, lambda *_, **__: signal.raise_signal(signal.SIGINT))
    assert main([command, *arguments, *([script] if command == "verify" else [])]) == 130


def test_ctrl_c_is_seen_of_every_command_that_does_not_take_it_for_its_end():
    assert set(AT_WORK) | {"run", "watch"} == set(COMMANDS)  # of `run` test_supervise.py sees it
