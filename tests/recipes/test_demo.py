from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch

import samestep
from samestep.recipes import demo


def test_it_trains_compares_and_says_where_its_files_lie(monkeypatch, tmp_path, capfd, two_ranks):
    """One epoch and three steps of it, of which the ranks are those of the session."""
    trained, difference = demo.train, demo.difference
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "train", lambda words: trained([*words, "--epochs", "1"]))
    monkeypatch.setattr(demo, "difference", lambda n: difference(n, 3))
    started = {2: two_ranks, 1: lambda fn, *given: [fn(*given)]}
    monkeypatch.setattr(samestep, "spawn", lambda fn, n, *given: started[n](fn, *given))
    assert demo.main() == 0
    shown = capfd.readouterr().out
    assert re.search(r"digits: [\d.]+ % of 360 held-out samples right, 1 epoch, 2 ranks", shown), shown
    apart = re.search(r"([\d,]+) parameters, at most ([\d.e+-]+) apart .*: the same training", shown)
    assert apart is not None, shown
    assert int(apart[1].replace(",", "")) > 1000
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert f"The run's files lie in {run_dir}" in shown


@pytest.mark.prove
def test_the_demonstration_trains_compares_and_says_where_its_files_lie(tmp_path):
    command = [sys.executable, "-m", "samestep.recipes.demo"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    found = re.search(r"digits: ([\d.]+) % of 360 held-out samples right, 15 epochs, 2 ranks", ended.stdout)
    assert found is not None, ended.stdout
    assert float(found[1]) >= 98
    assert "the same training" in ended.stdout
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert f"The run's files lie in {run_dir}" in ended.stdout


@pytest.mark.parametrize(("apart", "code"), [(0.0, 0), (1e-13, 0), (1e-12, 1), (0.5, 1), (float("nan"), 1)])
def test_it_fails_when_the_parameters_are_apart(monkeypatch, capsys, apart, code):
    monkeypatch.setattr(demo, "train", lambda words: {"exit": 0, "run_dir": "runs/x"})
    monkeypatch.setattr(demo, "difference", lambda n: (apart, 100))
    assert demo.main() == code
    assert ("another training" in capsys.readouterr().out) == bool(code)


def test_it_fails_when_the_training_failed(monkeypatch):
    monkeypatch.setattr(demo, "RECIPE", "samestep.recipes.nothing")
    monkeypatch.setattr(demo, "difference", lambda n: pytest.fail("there is nothing to compare"))
    assert demo.main() == 1


@pytest.mark.prove
def test_twenty_steps_move_the_parameters_far_beyond_the_tolerance():
    assert float((demo.trained(1) - demo.trained(20)).abs().max()) > 0.01


@pytest.mark.parametrize(("gpus", "device"), [(0, None), (1, "cpu"), (2, None)])
def test_both_parts_train_on_the_cpu_where_there_is_one_gpu_for_two_processes(monkeypatch, gpus, device):
    asked = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(demo, "train", lambda words: asked.append(words[4:]) or {"exit": 0, "run_dir": "runs/x"})
    monkeypatch.setattr(samestep, "spawn", lambda fn, n, *given: asked.append((n, given[1])) or [torch.zeros(1)])
    assert demo.main() == 0
    words = [demo.RECIPE] if device is None else [demo.RECIPE, "--device", device]
    assert asked == [words, (2, device), (1, device)]
