from __future__ import annotations

import contextlib
import io
import re
import subprocess
import sys

import pytest
import torch

import samestep
from samestep.recipes import common, digits

ENOUGH = 98.0  # percent


def share(printed):
    """The percentage in the summary line, which must be the last of rank 0's."""
    lines = [line for line in printed.splitlines() if "held-out samples right" in line]
    assert len(lines) == 1, printed
    found = re.search(r"digits: ([\d.]+) % of 360 held-out samples right", lines[0])
    assert found is not None, lines[0]
    return float(found[1])


def python(*arguments, cwd):
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)


def test_360_digits_are_held_out_and_every_digit_is_in_one_part_alone():
    train, held_out = digits.load_digits()
    assert (len(train), len(held_out)) == (1437, 360)
    images = torch.cat([train.tensors[0], held_out.tensors[0]])
    assert images.shape == (1797, 1, 8, 8)
    assert (float(images.min()), float(images.max())) == (0.0, 1.0)
    assert set(held_out.tensors[1].tolist()) == set(range(10))


def test_the_split_does_not_depend_on_the_runs_seed():
    torch.manual_seed(1)
    one = digits.load_digits()[1].tensors[0]
    torch.manual_seed(2)
    assert torch.equal(one, digits.load_digits()[1].tensors[0])


def test_an_empty_batch_gives_no_scores():
    assert digits.DigitNet()(torch.zeros(0, 1, 8, 8)).shape == (0, 10)


def test_15_epochs_are_trained_where_nothing_else_is_asked_for():
    assert digits.parser().parse_args([]).epochs == 15


@pytest.mark.prove
def test_alone_it_names_98_percent_of_the_held_out_digits(capsys):
    assert digits.main([]) == 0
    printed = capsys.readouterr().out
    assert share(printed) >= ENOUGH
    assert "15 epochs, 1 rank, " in printed.splitlines()[-1]


@pytest.mark.prove
def test_torchrun_trains_it_on_two_processes(tmp_path):
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    ended = python(*torchrun, "-m", "samestep.recipes.digits", "--epochs", 2, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert share(ended.stdout) > 80
    assert "2 epochs, 2 ranks" in ended.stdout


@pytest.mark.prove
def test_a_run_stopped_after_an_epoch_goes_on_as_if_it_had_not(tmp_path, capsys):
    common = ["--epochs"]
    assert digits.main([*common, "2", "--checkpoint", str(tmp_path / "whole")]) == 0
    whole = capsys.readouterr().out.splitlines()
    halved = ["--checkpoint", str(tmp_path / "halved"), "--save-every", "10 steps"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digits.Training, "steps", stopping_after(30))
        with pytest.raises(Stopped):
            digits.main([*common, "2", *halved])
    capsys.readouterr()
    assert digits.main([*common, "2", *halved]) == 0
    rest = capsys.readouterr().out.splitlines()
    assert rest[0] == "digits: goes on in epoch 2/2 after step 7/23"
    ends = [[line for line in lines if "held out" in line] for lines in (whole, rest)]  # a slow step is printed too
    assert ends[1][0].rpartition("  ")[0] == ends[0][1].rpartition("  ")[0]  # all but the rate


class Stopped(Exception):  # noqa: N818
    """The end of the run, in the middle of an epoch."""


def stopping_after(count):
    """`Training.steps` that stops the run after so many steps of all epochs."""
    whole, taken = digits.Training.steps, []

    def steps(self):
        for step in whole(self):
            yield step
            taken.append(None)
            if len(taken) == count:
                raise Stopped

    return steps


def test_a_finished_training_is_evaluated_again(tmp_path, capsys):
    arguments = ["--epochs", "1", "--checkpoint", str(tmp_path)]
    assert digits.main(arguments) == 0
    first = share(capsys.readouterr().out)
    assert digits.main(arguments) == 0
    assert share(capsys.readouterr().out) == first


@pytest.mark.parametrize("precision", [pytest.param("bf16", marks=pytest.mark.prove), "float64"])
def test_losses_are_never_in_less_than_float32(monkeypatch, capsys, precision):
    taken, mean = set(), samestep.Shards.mean

    def noted(batches, losses, *rest, **more):
        taken.add(losses.dtype)
        return mean(batches, losses, *rest, **more)

    monkeypatch.setattr(samestep.Shards, "mean", noted)
    assert digits.main(["--precision", precision, "--epochs", "1"]) == 0
    assert taken == {common.dtype(precision)}
    assert share(capsys.readouterr().out) > 50


@pytest.mark.prove
def test_workers_and_micro_batches_train_too(capsys):
    assert digits.main(["--epochs", "2", "--workers", "1", "--micro-batch-size", "24"]) == 0
    assert share(capsys.readouterr().out) > 80


def code_and_errors(*arguments):
    with contextlib.redirect_stderr(io.StringIO()) as said:
        return digits.main(arguments), said.getvalue()


def test_a_batch_smaller_than_the_world_is_one_line_and_exit_code_2_on_every_rank(two_ranks):
    for code, said in two_ranks(code_and_errors, "--batch-size", "1"):
        assert code == 2
        assert said.startswith("digits: error: batch_size 1 is smaller than the 2 ranks")
        assert said.count("\n") == 1


def test_an_unknown_backend_is_one_line_and_exit_code_2(capsys):
    assert digits.main(["--backend", "carrier-pigeon"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("digits: error: unknown backend 'carrier-pigeon'")
    assert said.count("\n") == 1
