from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import shutil
import subprocess
import sys

import pytest
import torch

import samestep
from samestep.recipes import imagenet
from samestep.recipes.imagenet_options import parse
from samestep.recipes.models import architecture
from samestep.testing import assert_same_bits

SMALL = ["--image-size", "32", "-j", "0", "-b", "20", "--lr", "0.01", "--no-accel"]


class Small(torch.nn.Module):
    """A network with BatchNorm that takes a hundredth of a ResNet-18's time."""

    def __init__(self, classes):
        super().__init__()
        self.conv1, self.bn1 = torch.nn.Conv2d(3, 8, 5, stride=2), torch.nn.BatchNorm2d(8)
        self.conv2, self.fc = torch.nn.Conv2d(8, 16, 3, stride=2), torch.nn.Linear(16, classes)

    def forward(self, x):
        return self.fc(self.conv2(self.bn1(self.conv1(x)).relu()).relu().mean(dim=(2, 3)))


def small_or_by_name(name, *, classes, zero_init=False):
    """In the place of a ResNet-18 a small network; others as ever."""
    return Small(classes) if name == "resnet18" else architecture(name, classes=classes, zero_init=zero_init)


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(imagenet, "architecture", small_or_by_name)


def run(folder, *more):
    return imagenet.main([str(folder), *SMALL, *map(str, more)])


MAIN = """
import sys
from samestep.recipes import imagenet
from samestep.recipes.models import architecture

if __name__ == "__main__":
    sys.exit(imagenet.main())
"""


def python(*arguments, cwd):
    (cwd / "imagenet.py").write_text(MAIN)
    command = [sys.executable, "imagenet.py", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # one thread each: ranks that share two cores with spinning threads mostly wait
    return subprocess.Popen(command, cwd=cwd, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, **pipes)


def trained(folder, *more):
    """Parameters and buffers after an epoch in float64, and its exact top-1 and top-5."""
    asked = parse([folder, *SMALL, "--precision", "float64", "-b", "41", *more])
    train_set, val_set = imagenet.datasets(asked)
    with pytest.MonkeyPatch.context() as patch, samestep.world(virtual_ranks=asked.virtual_ranks) as world:
        patch.setattr(imagenet, "architecture", small_or_by_name)
        training = imagenet.Training(asked, world, train_set, seed=0)
        for _ in training.steps(0.01):
            training.batches.commit()
        shares = imagenet.top_1_and_5(training, val_set, world, asked)
        state = {name: tensor.clone() for name, tensor in training.model.state_dict().items()}
    return state, shares


def test_training_and_evaluation_on_two_ranks_are_those_on_one(two_ranks, digit_folder):
    (state, shares), (_, other_shares) = two_ranks(trained, str(digit_folder))
    one, one_shares = trained(str(digit_folder))
    assert shares == other_shares == one_shares
    assert list(state) == list(one)
    apart = {name: float((state[name] - one[name]).abs().max()) for name in state}
    assert max(apart.values()) < 1e-12, max(apart, key=apart.get)
    fresh = Small(10).double().state_dict()
    assert not torch.equal(one["bn1.running_mean"], fresh["bn1.running_mean"])


def test_with_virtual_ranks_not_a_bit_depends_on_the_ranks(two_ranks, digit_folder):
    (state, shares), (_, other_shares) = two_ranks(trained, str(digit_folder), "--virtual-ranks", "2")
    one, one_shares = trained(str(digit_folder), "--virtual-ranks", "2")
    assert shares == other_shares == one_shares
    assert_same_bits(state, one)


def test_accuracy_counts_every_validation_image_once(digit_folder):
    asked = parse([str(digit_folder), *SMALL])
    train_set, val_set = imagenet.datasets(asked)
    with samestep.world() as world:
        training = imagenet.Training(asked, world, train_set, seed=0)
        top_1, top_5 = imagenet.top_1_and_5(training, val_set, world, asked)
        model = training.model.module.eval()
        with torch.no_grad():
            ranked = [model(image[None]).argsort(descending=True)[0].tolist() for image, _ in val_set]
    places = [guesses.index(label) for guesses, label in zip(ranked, val_set.labels, strict=True)]
    assert top_1 == sum(place < 1 for place in places) / 30
    assert top_5 == sum(place < 5 for place in places) / 30


def test_an_epoch_of_training_ends_with_exact_accuracies(digit_folder, capsys):
    assert run(digit_folder, "--epochs", 1, "-p", 2) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "imagenet: nothing is saved: --checkpoint DIR saves, and resumes from there"
    assert lines[1].startswith("imagenet: epoch 1/1  step 2/4  loss ")
    assert "  lr 0.01  " in lines[1]
    assert "of 30 validation images, 1 epoch, 1 rank" in lines[-1]


def test_evaluate_measures_a_checkpoint_without_training(digit_folder, tmp_path, capsys):
    assert run(digit_folder, "--epochs", 1, "--checkpoint", tmp_path / "kept") == 0
    trained_line = capsys.readouterr().out.splitlines()[-1]
    assert run(digit_folder, "--epochs", 1, "-e", "--resume", tmp_path / "kept") == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.split(", 1 ")[0] == trained_line.split(", 1 ")[0]
    assert "epoch" not in line  # none was trained


def test_resume_goes_on_with_the_next_epoch(digit_folder, tmp_path, capsys):
    assert run(digit_folder, "--epochs", 1, "--checkpoint", tmp_path / "kept") == 0
    assert run(digit_folder, "--epochs", 2, "--resume", tmp_path / "kept") == 0
    assert "imagenet: goes on in epoch 2/2 after step 0/4" in capsys.readouterr().out


def test_pretrained_weights_of_the_official_format_are_taken(digit_folder, tmp_path, capsys):
    weights = {f"module.{name}": tensor for name, tensor in Small(10).state_dict().items()}
    weights["module.fc.bias"] = torch.tensor([100.0, *[0.0] * 9])  # sure of class 0
    torch.save({"state_dict": weights, "epoch": 90}, tmp_path / "model_best.pth.tar")
    assert run(digit_folder, "-e", "--pretrained", tmp_path / "model_best.pth.tar") == 0
    assert "top-1 10.0 %, " in capsys.readouterr().out
    assert run(digit_folder, "-e", "--resume", tmp_path / "model_best.pth.tar") == 0
    assert "top-1 10.0 %, " in capsys.readouterr().out


def test_start_epoch_counts_from_there(digit_folder, capsys):
    assert run(digit_folder, "--epochs", 31, "--start-epoch", 30) == 0
    printed = capsys.readouterr().out
    assert "epoch 31/31" in printed
    assert "epoch 1/31" not in printed
    assert "  lr 0.001  " in printed


def test_the_rate_falls_by_ten_every_thirty_epochs():
    assert [imagenet.learning_rate(0.1, epoch) for epoch in (0, 29, 30, 59, 60, 89)] == [
        pytest.approx(rate) for rate in (0.1, 0.1, 0.01, 0.01, 0.001, 0.001)
    ]


def test_dummy_images_need_no_folder(tmp_path, capsys):
    assert run(tmp_path / "nowhere", "--dummy", "--dummy-images", 25, "--epochs", 1) == 0
    assert "of 1 validation images" in capsys.readouterr().out


def test_cudnn_times_its_convolutions_unless_a_seed_is_given(digit_folder):
    assert run(digit_folder, "-e") == 0
    assert torch.backends.cudnn.benchmark


def deterministic_after_a_seeded_run(folder):
    code = run(folder, "-e", "--seed", 3)
    return code, torch.backends.cudnn.benchmark, torch.are_deterministic_algorithms_enabled()


def test_a_seed_asks_for_deterministic_kernels(two_ranks, digit_folder):
    assert two_ranks(deterministic_after_a_seeded_run, str(digit_folder)) == [(0, False, True)] * 2


DUMMY = ["--dummy", "--dummy-images", 20, "--epochs", 1]
JOIN_AND_TRAIN = imagenet.join_and_train


def join_and_train_small(asked, number):
    """Returns what this rank prints."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.setattr(imagenet, "architecture", small_or_by_name)
        JOIN_AND_TRAIN(asked, number)
    return printed.getvalue()


def test_multiprocessing_distributed_trains_on_so_many_ranks(two_ranks, monkeypatch, tmp_path):
    """The ranks are those of the session."""
    printed = []

    def in_place_of_spawn(function, number, *given, progress):
        assert (function, number, progress) == (join_and_train_small, 2, False)
        printed.extend(two_ranks(function, *given))

    monkeypatch.setattr(imagenet, "join_and_train", join_and_train_small)
    monkeypatch.setattr(samestep, "spawn", in_place_of_spawn)
    assert run(tmp_path, *DUMMY, "--multiprocessing-distributed", "--processes", 2) == 0
    assert ["1 epoch, 2 ranks" in text for text in printed] == [True, False]


@pytest.mark.prove
def test_multiprocessing_distributed_starts_the_ranks(tmp_path):
    options = ("--multiprocessing-distributed", "--processes", 2)
    started = python(*SMALL, *DUMMY, *options, cwd=tmp_path)
    printed, said = started.communicate(timeout=120)
    assert started.returncode == 0, said
    assert "1 epoch, 2 ranks" in printed


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--world-size", "2", "--rank", "1", "--dist-url", "tcp://a:1"], (3, 6, "tcp://a:1")),
        (["--world-size", "2", "--dist-url", "tcp://a:1"], (0, 6, "tcp://a:1")),
        ([], (-1, -1, None)),
    ],
)
def test_the_first_of_three_processes_of_a_machine_has_its_rank_among_all(monkeypatch, words, told):
    seen = []
    monkeypatch.setattr(imagenet, "train", lambda asked: seen.append((asked.rank, asked.world_size, asked.dist_url)))
    imagenet.join_and_train(parse(["--dummy", *words]), 3)
    assert seen == [told]


@pytest.mark.prove
def test_two_machines_of_one_rank_each_meet_at_the_dist_url(tmp_path):
    options = ["--multiprocessing-distributed", "--processes", 1, "--world-size", 2]
    options += ["--dist-url", f"file://{tmp_path}/meeting", "--dist-backend", "gloo"]
    machines = [python(*SMALL, *DUMMY, *options, "--rank", rank, cwd=tmp_path) for rank in (0, 1)]
    (printed, said), (silent, other) = (machine.communicate(timeout=120) for machine in machines)
    assert [machine.returncode for machine in machines] == [0, 0], said + other
    assert "1 epoch, 2 ranks" in printed
    assert not silent


def test_multiprocessing_without_a_gpu_asks_for_a_number(digit_folder, capsys):
    assert run(digit_folder, "--multiprocessing-distributed") == 2
    assert "--processes N" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (["--arch", "resnet19"], "unknown architecture 'resnet19'"),
        (["--resume", "/nowhere/at/all"], "nothing to resume at /nowhere/at/all"),
        (["--pretrained", "/nowhere/w.pth"], "no file of weights at /nowhere/w.pth"),
        (["--world-size", "2"], "--world-size 2 needs --dist-url"),
    ],
)
def test_what_the_caller_can_fix_is_one_line_and_exit_code_2(digit_folder, capsys, more, reason):
    assert run(digit_folder, *more) == 2
    said = capsys.readouterr().err
    assert said.startswith("imagenet: error: ")
    assert reason in said
    assert said.count("\n") == 1


def test_a_missing_data_folder_is_one_line_and_exit_code_2(tmp_path, capsys):
    assert run(tmp_path / "nowhere") == 2
    assert capsys.readouterr().err.startswith(f"imagenet: error: no data folder at {tmp_path}/nowhere")


def test_an_empty_directory_holds_no_checkpoint(digit_folder, tmp_path, capsys):
    assert run(digit_folder, "--resume", tmp_path) == 2
    assert capsys.readouterr().err == f"imagenet: error: there is no checkpoint in {tmp_path}\n"


@pytest.mark.parametrize("part", ["train", "val"])
def test_a_broken_image_is_named_from_a_loader_process_too(digit_folder, tmp_path, capsys, part):
    shutil.copytree(digit_folder, tmp_path, dirs_exist_ok=True)
    broken = next((tmp_path / part / "4").iterdir())
    broken.write_bytes(b"hello")
    before = set(multiprocessing.active_children())
    assert run(tmp_path, "--epochs", 1, "-j", 1) == 2
    said = capsys.readouterr().err
    assert said.startswith("imagenet: error: ")
    assert f"cannot read image {broken}: " in said
    assert said.count("\n") == 1
    assert set(multiprocessing.active_children()) <= before
