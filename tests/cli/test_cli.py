"""The door: help without torch, and usage errors of one line that say how to mend them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from samestep.cli import main


def test_the_version_is_shown(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("samestep ")


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], []])
def test_help_has_examples_and_takes_no_torch(arguments):
    code = (
        "import sys; from samestep.cli import main\n"
        "try: code = main(sys.argv[1:])\nexcept SystemExit as error: code = error.code\n"
        "heavy = {'torch', 'numpy', 'rich', 'multiprocessing'} & set(sys.modules)\n"
        "print(code, heavy, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    assert done.stderr.split()[0] in {"0", "None"}
    assert done.stderr.endswith("set()\n")
    assert "samestep run -n 2 train.py" in done.stdout


def test_python_m_samestep_is_the_same_program():
    done = subprocess.run([sys.executable, "-m", "samestep", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("samestep ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rnu", "x.py"], "there is no command 'rnu': did you mean `samestep run`?"),
        (["train.py", "-n", "2"], "did you mean `samestep run train.py -n 2`?"),
        (["run"], "no script is given: `samestep run -n 2 train.py`"),
        (["run", "-m"], "no script is given"),
        (["run", "nowhere.py"], "there is no script nowhere.py in"),
        (["run", "json.tool"], "for the module, `samestep run -m json.tool`"),
        (["run", "-m", "no.such.module"], "there is no module no.such.module"),
        (["run", "-m", "collections.abc.x"], "there is no module collections.abc.x"),
        (["run", "-m", "logging"], "logging is a package without a __main__.py"),
        (["run", "-n", "0", "x.py"], "'0' is not a number of processes; give 1 or more, or auto"),
        (["run", "-n", "-1", "x.py"], "argument -n"),
        (["run", "-n", "abc", "x.py"], "'abc' is not a number of processes"),
        (["run", "-n"], "argument -n: expected one argument"),
        (["run", "--dry", "x.py"], "unknown option --dry: did you mean --dry-run?"),
        (["run", "-n", "2", "--run-dri=x", "x.py"], "unknown option --run-dri: did you mean --run-dir?"),
    ],
)
def test_a_usage_error_is_one_line_and_code_2(capsys, monkeypatch, tmp_path, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("samestep: error: ")
    assert shown.err.count("\n") == 1
    assert message in shown.err
    assert not shown.out
    assert not any(tmp_path.iterdir())


def test_a_run_directory_is_not_used_twice(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "run.json").touch()
    assert main(["run", "--run-dir", "here", "train.py"]) == 2
    assert "here holds another run already" in capsys.readouterr().err


def test_a_dry_run_shows_what_a_shell_would_take_and_starts_nothing(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    (tmp_path / "train.py").touch()
    assert main(["run", "-n", "2", "--dry-run", "train.py", "--name", "a b"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("samestep.launch.bootstrap") == 2
    assert "RANK=1 LOCAL_RANK=1 WORLD_SIZE=2" in shown
    assert "OMP_NUM_THREADS=" in shown
    assert "train.py --name 'a b'" in shown
    assert os.listdir(tmp_path) == ["train.py"]  # noqa: PTH208


@pytest.mark.parametrize(("visible", "expected"), [("", 0), ("0", 1), ("1,0,-1,2", 2), ("GPU-abc,1", 2)])
def test_auto_counts_the_gpus_that_cuda_would_see(monkeypatch, tmp_path, visible, expected):
    from samestep.launch.devices import visible_gpus

    for index in range(4):
        (tmp_path / "driver" / str(index)).mkdir(parents=True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("PATH", str(tmp_path))  # no nvidia-smi
    assert visible_gpus(tmp_path / "driver") == expected


def test_json_says_how_the_run_ended(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("raise SystemExit(5)")
    assert main(["run", "-n", "1", "--json", "result.json", "train.py"]) == 5
    result = json.loads((tmp_path / "result.json").read_text())
    assert set(result) == {"exit", "run_dir", "failure"}
    assert set(result["failure"]) == {"rank", "host", "pid", "signal", "exception", "message", "where", "waiting"}
    assert result["exit"] == 5
