from __future__ import annotations

from pathlib import Path

import pytest

import samestep
from samestep.recipes.imagenet_options import parse, settle_files, world_arguments

ALONE = {"backend": None, "init_method": None, "rank": None, "size": None, "device": None, "virtual_ranks": None}


def test_defaults_are_those_of_the_official_example():
    asked = parse([])
    assert (asked.arch, asked.epochs, asked.start_epoch, asked.batch_size) == ("resnet18", 90, 0, 256)
    assert (asked.lr, asked.momentum, asked.weight_decay) == (0.1, 0.9, 1e-4)
    assert (asked.workers, asked.print_freq, asked.seed) == (4, 10, None)
    assert asked.data == Path("imagenet")


@pytest.mark.parametrize(
    "line",
    [
        "-a resnet18 /data",
        "/data -a resnet50 --lr 0.01 --wd 5e-5 --weight-decay 5e-5 --learning-rate 0.2",
        "--dist-url tcp://h:2345 --dist-backend nccl --multiprocessing-distributed --world-size 1 --rank 0 /data",
        "--dist-url tcp://h:2345 --dist-backend gloo --multiprocessing-distributed --world-size 2 --rank 1 /data",
        "-a resnet18 --dummy",
        "-e --resume model.pth -j 8 -b 512 -p 100 --gpu 1 --seed 3 --no-accel --start-epoch 30 /data",
    ],
)
def test_command_lines_of_the_official_example_are_understood(line):
    parse(line.split())


def test_a_number_of_processes_that_nobody_starts_is_refused(capsys):
    with pytest.raises(SystemExit):
        parse(["--processes", "2"])
    assert "--processes counts the ranks that --multiprocessing-distributed starts" in capsys.readouterr().err
    assert parse(["--processes", "2", "--multiprocessing-distributed"]).processes == 2


def test_alone_nothing_is_asked_of_the_world():
    assert world_arguments(parse([])) == ALONE


def test_ranks_started_by_hand_say_where_they_meet():
    line = "--world-size 4 --rank 2 --dist-url tcp://host:2345 --dist-backend gloo --no-accel"
    assert world_arguments(parse(line.split())) == {
        **ALONE,
        "backend": "gloo",
        "init_method": "tcp://host:2345",
        "rank": 2,
        "size": 4,
        "device": "cpu",
    }


def test_a_gpu_can_be_named():
    assert world_arguments(parse(["--gpu", "1"])) == {**ALONE, "device": "cuda:1"}


def test_several_ranks_need_an_address():
    with pytest.raises(samestep.UsageError, match="--world-size 2 needs --dist-url"):
        world_arguments(parse(["--world-size", "2", "--rank", "0"]))


def test_resume_from_a_directory_saves_there_too(tmp_path):
    asked = parse(["--resume", str(tmp_path)])
    settle_files(asked)
    assert asked.checkpoint == tmp_path
    assert asked.pretrained is None


def test_resume_from_a_file_takes_its_weights(tmp_path):
    (tmp_path / "w.pth").touch()
    asked = parse(["--resume", str(tmp_path / "w.pth")])
    settle_files(asked)
    assert asked.pretrained == tmp_path / "w.pth"
    assert asked.checkpoint is None


def test_resume_from_nothing_is_an_error(tmp_path):
    with pytest.raises(samestep.UsageError, match="nothing to resume at .*nowhere"):
        settle_files(parse(["--resume", str(tmp_path / "nowhere")]))


def test_resume_and_checkpoint_must_agree(tmp_path):
    with pytest.raises(samestep.UsageError, match="must not name another"):
        settle_files(parse(["--resume", str(tmp_path), "--checkpoint", "elsewhere"]))


@pytest.mark.parametrize("option", ["--momentum", "--wd"])
@pytest.mark.parametrize("value", ["nan", "-1", "inf", "much"])
def test_numbers_that_sgd_cannot_use_are_refused_in_one_line(option, value, capsys):
    with pytest.raises(SystemExit) as ended:
        parse([f"{option}={value}"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert f"{value!r} is not a number of at least 0" in said
    assert said.count("\n") == 1
