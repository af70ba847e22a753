"""scripts/test_gpu.py runs on fake GPUs, so that it will on a real one."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from samestep import testing

SCRIPT = Path(__file__).parent.parent.parent / "scripts" / "test_gpu.py"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec = importlib.util.spec_from_file_location("test_gpu_script", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_needs_no_command_holds_on_a_fake_gpu(script, capsys: pytest.CaptureFixture[str]) -> None:
    with testing.fake_gpus(1):
        assert script.run([1]) == 0, capsys.readouterr().out
    rows = capsys.readouterr().out.splitlines()[2:]
    assert len(rows) == len(script.PARTS[1])


@pytest.mark.prove
def test_verify_of_three_scripts_holds_on_a_fake_gpu(script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMESTEP_FAKE_GPUS", "1")
    assert script.verify() == "exit codes sgd 0, adamw 0, scaled 1"


def test_without_a_gpu_it_says_so(script, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["test_gpu.py"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert script.main() == 2
    assert "no GPU is here" in capsys.readouterr().out


def test_the_tests_that_it_takes_from_the_suite_are_there(script) -> None:
    for file, _, name in (one.partition("::") for one in script.SUITE):
        assert f"def {name}(" in (SCRIPT.parent.parent / "tests" / file).read_text(encoding="utf-8")
