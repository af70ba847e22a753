from __future__ import annotations

import argparse

import pytest
import torch

import samestep
from samestep.recipes import common


@pytest.fixture
def parser():
    made = common.parser("recipe", "A recipe.")
    common.add_training_options(made, epochs=3, batch_size=64, lr=0.1)
    return made


def test_defaults_are_the_recipes_own(parser):
    asked = parser.parse_args([])
    assert (asked.epochs, asked.batch_size, asked.lr) == (3, 64, 0.1)
    assert asked.checkpoint is None


@pytest.mark.parametrize(
    "arguments",
    [
        ["--batch-size", "0"],
        ["--batch-size", "2.5"],
        ["--epochs", "-1"],
        ["--lr", "0"],
        ["--lr", "nan"],
        ["--lr", "inf"],
        ["--lr", "fast"],
        ["--workers", "-1"],
        ["--precision", "fp8"],
        ["--unheard-of"],
    ],
)
def test_a_senseless_option_is_one_line_and_exit_code_2(parser, arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        parser.parse_args(arguments)
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("recipe: error: ")
    assert said.count("\n") == 1
    assert arguments[0] in said


def fail_with(error):
    def body():
        raise error

    return body


def test_a_usage_error_is_one_line_and_exit_code_2(capsys):
    assert common.run_main("recipe", fail_with(samestep.UsageError("give more"))) == 2
    assert capsys.readouterr().err == "recipe: error: give more\n"


def test_a_missing_extra_says_what_to_install(capsys):
    assert common.run_main("recipe", fail_with(ModuleNotFoundError("no", name="sklearn"))) == 2
    said = "recipe: error: scikit-learn is not installed: pip install 'samestep[recipes]'\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    "error", [RuntimeError("a bug"), samestep.SamestepError("a failure"), ModuleNotFoundError("no", name="bug")]
)
def test_other_errors_go_on_to_the_launcher(error):
    with pytest.raises(type(error), match=str(error)):
        common.run_main("recipe", fail_with(error))


def test_a_recipe_that_ends_well_returns_0():
    assert common.run_main("recipe", lambda: None) == 0


def test_a_loader_processes_error_is_told_by_its_last_line():
    text = (
        "Caught UsageError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
        "  File 'x.py', line 3\nsamestep.errors.UsageError: cannot read image a.jpg: broken\n"
    )
    assert common.one_line(samestep.UsageError(text)) == "cannot read image a.jpg: broken"


def test_bf16_computes_in_bf16_and_keeps_float32_weights():
    weight = torch.ones(2, 2)
    with common.autocast("bf16", torch.device("cpu")):
        product = weight @ weight
    assert product.dtype == torch.bfloat16
    assert common.at_least_float32(product).dtype == torch.float32
    assert common.dtype("bf16") == torch.float32


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_other_precisions_are_left_as_they_are(precision):
    weight = torch.ones(2, 2, dtype=common.dtype(precision))
    with common.autocast(precision, torch.device("cpu")):
        assert (weight @ weight).dtype == getattr(torch, precision)
    assert common.at_least_float32(weight) is weight


def test_without_a_checkpoint_every_epoch_is_trained_and_steps_still_end():
    data = torch.utils.data.TensorDataset(torch.arange(6.0))
    with samestep.world() as world:
        batches = samestep.shards(data, world, batch_size=3)
        state = common.make_checkpoint(argparse.Namespace(checkpoint=None, save_every="10 min"), world, batches)
        losses = []
        for _ in state.epochs(2):
            for (x,) in batches:
                batches.mean(x * 0 + 1)
                state.commit()
                losses.append(batches.loss)
    assert losses == [1.0] * 4
    assert not state.resumed
