"""Which scripts cannot be forked, and that a fork sees what a fresh interpreter sees."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from samestep.launch.start.fork import fork_blocker, read_source


@pytest.mark.parametrize(
    "line",
    [
        'os.environ["OMP_NUM_THREADS"] = "3"',
        'os.environ.setdefault("OMP_NUM_THREADS", "3")',
        'os.environ.update(OMP_NUM_THREADS="3")',
        'os.environ.update({"LR": "1", "OMP_NUM_THREADS": "3"})',
        'os.environ |= {"OMP_NUM_THREADS": "3"}',
        'os.environ |= dict(OMP_NUM_THREADS="3")',
        'os.environ.pop("OMP_NUM_THREADS", None)',
        'del os.environ["OMP_NUM_THREADS"]',
        'os.unsetenv("OMP_NUM_THREADS")',
        'from os import environ as env; env["OMP_NUM_THREADS"] = "3"',
        'env = os.environ; env["OMP_NUM_THREADS"] = "3"',
    ],
)
def test_a_variable_that_torch_reads_when_it_is_imported_needs_a_fresh_interpreter(line):
    assert fork_blocker(f"import os\n{line}\nimport torch") == "it sets OMP_NUM_THREADS in line 2"


@pytest.mark.parametrize(
    "line",
    [
        "os.environ[name] = '3'",
        "os.environ.update(settings)",
        "os.environ |= settings",
        "os.environ.update(**settings)",
        "os.environ.update({name: '3'})",
        "os.environ.pop(name)",
        "os.environ.clear()",
    ],
)
def test_so_does_one_whose_name_is_not_written_there(line):
    assert "not written there in line 1" in fork_blocker(line)


@pytest.mark.parametrize(
    "line",
    [
        'os.environ["MASTER_PORT"] = "1"',
        'os.environ.update(MASTER_ADDR="a", MASTER_PORT="1")',
        'print(os.environ["OMP_NUM_THREADS"], os.environ.get(name), os.environ.copy())',
        "settings.update(more); settings.pop(name); settings |= more; del settings[name]",
    ],
)
def test_other_variables_do_not(line):
    assert fork_blocker(line) is None


def test_the_text_of_a_module_is_found_without_importing_what_lies_above_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in {"__init__": "raise SystemExit", "__main__": "# main", "train": "# train"}.items():
        (tmp_path / "lesson_of_fork").mkdir(exist_ok=True)
        (tmp_path / "lesson_of_fork" / f"{name}.py").write_text(text)
    assert read_source("lesson_of_fork.train", is_module=True) == "# train"
    assert read_source("lesson_of_fork", is_module=True) == "# main"
    assert read_source("lesson_of_fork.missing", is_module=True) == ""
    assert "lesson_of_fork" not in sys.modules


def test_a_pipe_is_not_read_for_its_text():
    reader, writer = os.pipe()
    os.write(writer, b"print(1)")
    os.close(writer)
    assert read_source(f"/dev/fd/{reader}", is_module=False) == ""
    assert os.read(reader, 100) == b"print(1)"
    os.close(reader)


@pytest.mark.fresh_interpreter
@pytest.mark.prove
def test_what_lies_in_the_current_directory_does_not_reach_forked_ranks(folder):
    """`python -m samestep` has the current directory on its path; a script elsewhere has not."""
    folder.script("import torch, typing_extensions\nprint(hasattr(typing_extensions, 'HERE'))", "inner/train.py")
    (folder.path / "typing_extensions.py").write_text("HERE = True\n")
    command = [sys.executable, "-m", "samestep", "run", "-n", "2", "--start", "fork", "inner/train.py"]
    done = subprocess.run(command, cwd=folder.path, capture_output=True, text=True, timeout=120, check=False)
    assert sorted(done.stdout.splitlines()) == ["[rank 0] False", "[rank 1] False"], done.stderr
    assert "starts in fresh interpreters" not in done.stderr  # torch, which needs that module, could be imported


def test_fresh_interpreters_get_the_options_of_the_launchers(folder):
    script = folder.script("print(sys.warnoptions[-1], sys.flags.optimize, sys.flags.dev_mode, __debug__)")
    options = ["-X", "dev", "-W", "error::FutureWarning", "-O"]
    command = [sys.executable, *options, "-m", "samestep", "run", "-n", "2", "--start", "spawn", script]
    done = subprocess.run(command, cwd=folder.path, capture_output=True, text=True, timeout=120, check=False)
    said = "error::FutureWarning 1 True False"
    assert sorted(done.stdout.splitlines()) == [f"[rank 0] {said}", f"[rank 1] {said}"], done.stderr
