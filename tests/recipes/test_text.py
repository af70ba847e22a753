from __future__ import annotations

import math
import re

import pytest
import torch

import samestep
from samestep.recipes import corpus, text
from samestep.recipes.common import cosine

SMALL = ["--width", "32", "--layers", "2", "--heads", "2", "--context", "64", "--sample", "8"]


def figures(printed, pattern):
    return [float(found) for found in re.findall(pattern, printed)]


def run(folder, *more):
    return text.main(["--data", str(folder), *SMALL, *map(str, more)])


def built(folder, world, *more):
    """A training in float64 with 10 sequences a step, and the held-out set."""
    asked = text.parser().parse_args([*SMALL, "--precision", "float64", "--batch-size", "10", *more])
    train_set, held_out = corpus.train_and_held_out(folder, total=90_000, context=64)
    return text.Training(asked, world, train_set), held_out


def test_bits_per_byte_fall_within_thirty_steps(modules, capsys):
    assert run(modules, "--bytes", 40_000, "--batch-size", 40, "--epochs", 2, "--warm-up", 5) == 0
    printed = capsys.readouterr().out
    first, last = figures(printed, r"held out bits per byte ([\d.]+)")
    assert last < first < 8
    assert last < 6.5


def test_the_summary_counts_every_held_out_byte(modules, capsys):
    assert run(modules, "--bytes", 30_000, "--batch-size", 64) == 0
    printed = capsys.readouterr().out
    _, held_out = corpus.train_and_held_out(modules, total=30_000, context=64)
    assert f"bits per byte over {held_out.bytes:,} held-out bytes, 1 epoch, 1 rank" in printed.splitlines()[-1]
    assert "tokens/s" in printed
    assert "text: it writes " in printed


def trained(folder, *more, steps=6):
    """Losses of each step, then parameters and bits per byte after `steps` steps of SGD."""
    with samestep.world() as world:
        training, held_out = built(folder, world, *more)
        training.optimizer = torch.optim.SGD(training.model.parameters(), lr=0.3, momentum=0.9)
        training.schedule = cosine(training.optimizer, 100, warm_up=2)
        losses = []

        for _ in training.steps():
            training.batches.commit()
            losses.append(training.batches.loss)
            if len(losses) == steps:
                break
        bits = text.bits_per_byte(training, held_out, world, 7)
        weights = torch.nn.utils.parameters_to_vector(training.model.parameters()).detach()
    return losses, weights, bits


@pytest.mark.parametrize("more", [[], ["--micro-batch-size", "2"]], ids=["whole", "accumulated"])
def test_masked_training_on_two_ranks_is_that_on_one(two_ranks, modules, more):
    (losses, weights, bits), other = two_ranks(trained, modules, *more)
    one_losses, one_weights, one_bits = trained(modules)
    assert losses == other[0]
    assert bits == other[2]
    assert len(one_losses) == 6
    assert max(abs(a - b) for a, b in zip(losses, one_losses, strict=True)) < 1e-12
    assert float((weights - one_weights).abs().max()) < 1e-12
    assert abs(bits - one_bits) < 1e-12
    assert float((one_weights - trained(modules, steps=1)[1]).abs().max()) > 1e-3  # it has moved


def test_the_steps_loss_is_the_mean_over_its_unmasked_bytes(modules):
    with samestep.world() as world:
        training, _ = built(modules, world)
        masked = 0
        for inputs, targets in training.batches:
            mask = targets != corpus.IGNORED
            losses = training.losses((inputs, targets))
            mean = training.batches.mean(losses, mask)
            assert torch.allclose(mean, losses[mask].mean(), rtol=0, atol=1e-14)
            masked += int((~mask).sum())
        assert masked > 0  # or the test would show nothing


def test_a_fresh_model_needs_about_eight_bits(modules):
    with samestep.world() as world:
        training, held_out = built(modules, world)
        assert abs(text.bits_per_byte(training, held_out, world, 16) - math.log2(257)) < 0.2


def test_a_width_that_heads_cannot_share_is_one_line_and_exit_code_2(capsys):
    assert text.main(["--width", "10", "--heads", "4"]) == 2
    assert capsys.readouterr().err == "text: error: --width 10 cannot be divided among --heads 4\n"


def test_a_data_folder_without_python_is_one_line_and_exit_code_2(tmp_path, capsys):
    assert text.main(["--data", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"text: error: {tmp_path} gives 0 Python files")
    assert said.count("\n") == 1


def test_a_run_goes_on_from_its_checkpoint(modules, tmp_path, capsys):
    arguments = ["--bytes", 30_000, "--batch-size", 64, "--checkpoint", tmp_path, "--epochs"]
    assert run(modules, *arguments, 1) == 0
    assert run(modules, *arguments, 2) == 0
    assert "text: goes on in epoch 2/2 after step 0/" in capsys.readouterr().out
