"""A resume says what is given otherwise than in the run that saved, and which counts; a fresh start keeps both runs."""

from __future__ import annotations

import argparse
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import samestep
from samestep.checkpoints.integrity import read_manifest
from samestep.checkpoints.settings import command_line
from samestep.cli import main


def script(path, *words, resume=True):
    """A training script with options, as a new user writes it; returns its checkpoint's state."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.001)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--api-key", default="")
    sys.argv = ["train.py", *words]
    args = parser.parse_args(words)
    with samestep.world(device="cpu") as world:
        torch.manual_seed(0)
        model = samestep.replicate(nn.Sequential(nn.Linear(3, 8), nn.Dropout(args.dropout), nn.Linear(8, 1)), world)
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
        data = samestep.shards(TensorDataset(torch.randn(128, 3)), world, batch_size=args.batch_size)
        state = samestep.checkpoint(path, world, resume=resume, model=model, optimizer=optimizer, data=data)
        for _ in state.epochs(args.epochs):
            for (x,) in data:
                data.mean(model(x).square().squeeze(1)).backward()
                optimizer.step()
                optimizer.zero_grad()
                state.commit()
        return state, optimizer.param_groups[0]["lr"]


@pytest.fixture(autouse=True)
def keep_argv(monkeypatch):
    monkeypatch.setattr(sys, "argv", sys.argv)


def test_the_new_users_case_more_epochs_another_rate_another_batch_size(tmp_path, capsys):
    script(tmp_path)
    assert capsys.readouterr().err == ""
    state, rate = script(tmp_path, "--epochs", "4", "--lr", "0.5", "--batch-size", "50")
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        f"samestep: resuming from {tmp_path}/step-00000004: 4 steps, 2 epochs finished; "
        "--lr 0.5 given, the saved optimizer state has 0.001 and wins; batch size 50 was 64; "
        "--epochs 4 was not given before"
    )
    assert (state.epoch, state.step, rate) == (4, 4 + 2 * 3, 0.001)
    assert (state.resumed.step, state.resumed.epoch) == (4, 2)
    assert state.resumed.path == tmp_path / "step-00000004"
    assert len(state.resumed.differences) == 3


def test_a_rate_that_counts_for_nothing_is_said_at_every_resume(tmp_path, capsys):
    script(tmp_path)
    for epochs in ("3", "4"):
        capsys.readouterr()
        script(tmp_path, "--lr", "0.5", "--epochs", epochs)
        assert "--lr 0.5 given, the saved optimizer state has 0.001 and wins" in capsys.readouterr().err


def test_what_a_run_changes_by_itself_is_no_difference(tmp_path, capsys):
    for _ in range(2):
        with samestep.world(device="cpu") as world:
            model = nn.Linear(2, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
            state = samestep.checkpoint(tmp_path, world, model=model, optimizer=optimizer, schedule=schedule)
            for loss in (1.0, 2.0, 3.0):
                schedule.step(loss)
            state.save()
    assert state.resumed.differences == ()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(" finished")


def test_the_same_command_says_no_more_than_where_it_resumes(tmp_path, capsys):
    script(tmp_path)
    script(tmp_path)
    first, second = capsys.readouterr().err.splitlines()
    assert first.endswith(": 4 steps, 2 epochs finished")
    assert "all 2 epochs are finished" in second
    assert "has no effect" not in second
    assert "--fresh" in second


def test_a_finished_run_that_is_given_other_values_says_that_they_have_no_effect(tmp_path, capsys):
    script(tmp_path)
    script(tmp_path, "--lr", "0.5", "--dropout", "0.9")
    first, second = capsys.readouterr().err.splitlines()
    assert "--lr 0.5 given, the saved optimizer state has 0.001 and wins" in first
    assert "model.1 Dropout(p=0.9, inplace=False) was Dropout(p=0.1, inplace=False)" in first
    assert "so what was given otherwise now has no effect: ask for more epochs, or start anew" in second


@pytest.mark.parametrize("by", ["argument", "variable"])
def test_a_fresh_start_moves_the_old_checkpoints_out_of_the_way(tmp_path, capsys, monkeypatch, by):
    script(tmp_path)
    before = read_manifest(tmp_path / "step-00000004")
    if by == "variable":
        monkeypatch.setenv("SAMESTEP_FRESH", "1")
    for number in (1, 2):
        state, rate = script(tmp_path, "--lr", "0.5", resume=by == "variable")
        moved = tmp_path / f"replaced-{number}"
        assert (
            f"starting anew in {tmp_path}: the checkpoints that were there are now in {moved}"
            in capsys.readouterr().err
        )
        assert (state.resumed, state.step, rate) == (None, 4, 0.5)
    assert read_manifest(tmp_path / "replaced-1" / "step-00000004") == before
    assert main(["checkpoint", "verify", str(tmp_path)]) == 0
    assert main(["checkpoint", "verify", str(tmp_path / "replaced-1")]) == 0


def test_the_command_line_asks_every_rank_for_a_fresh_start(tmp_path, capsys):
    (tmp_path / "train.py").write_text("")
    for words, asked in ((["--fresh"], 2), ([], 0)):
        assert main(["run", "-n", "2", *words, "--dry-run", str(tmp_path / "train.py")]) == 0
        assert capsys.readouterr().out.count("SAMESTEP_FRESH=1") == asked


def test_what_a_launcher_restarts_resumes_though_a_fresh_start_was_asked_for(tmp_path, monkeypatch):
    script(tmp_path, resume=False)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    state, _ = script(tmp_path, "--epochs", "3", resume=False)
    assert state.resumed.step == 4


def test_show_tells_what_was_given_and_no_secret_is_kept(tmp_path, capsys):
    script(tmp_path, "--api-key", "hunter2", "--lr", "0.25")
    assert main(["checkpoint", "show", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "command: train.py --api-key '***' --lr 0.25" in shown
    assert "given to optimizer: lr=0.25, betas=[0.9, 0.999]" in shown
    assert "given to data: batch_size=64" in shown
    assert "Dropout" not in shown
    assert not any(b"hunter2" in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    assert main(["checkpoint", "show", str(tmp_path), "--all"]) == 0
    assert "1=Dropout(p=0.1, inplace=False)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (["t.py", "--password=abc"], ["t.py", "--password=***"]),
        (["t.py", "--hf-token", "abc", "x"], ["t.py", "--hf-token", "***", "x"]),
        (["t.py", "WANDB_API_KEY=abc"], ["t.py", "WANDB_API_KEY=***"]),
        (["t.py", "--use-token", "--lr", "1"], ["t.py", "--use-token", "--lr", "1"]),
        (["t.py", "--lr", "1"], ["t.py", "--lr", "1"]),
    ],
)
def test_values_of_options_that_name_a_secret_are_masked(words, kept):
    assert command_line(words) == kept
