"""The built wheel, in an environment of its own without the checkout: what a user installs works."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NEEDED = ("pyproject.toml", "README.md", "LICENSE", "src")

pytestmark = [pytest.mark.prove, pytest.mark.timeout(900)]


def call(*command, cwd, **variables):
    """Runs a command without what points to the checkout; returns its exit code, and all that it says."""
    kept = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env={**kept, **variables}, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built by pip from a copy of the sources."""
    folder = tmp_path_factory.mktemp("wheel")
    (folder / "source").mkdir()
    for name in NEEDED:
        there = folder / "source" / name
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, there, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, there)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    code, said = call(*pip, "wheel", "-q", "--no-deps", "-w", folder, folder / "source", cwd=folder)
    assert code == 0, said
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The Python of a fresh environment that has the wheel, and the libraries of this one behind it."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", folder / "env"], check=True)
    python = folder / "env" / "bin" / "python"
    code, said = call(python, "-m", "pip", "install", "-q", "--no-deps", wheel, cwd=folder)
    assert code == 0, said
    (own,) = (folder / "env" / "lib").glob("python*/site-packages")
    (own / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    code, said = call(python, "-c", "import samestep; print(samestep.__file__)", cwd=folder)
    assert (code, Path(said.strip()).parent) == (0, own / "samestep")
    return python


def test_the_wheel_has_types_and_the_pages_of_reports(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {"samestep/py.typed", "samestep/reporting/assets/page.html"} <= set(names)
    assert {name.partition("/")[0] for name in names} == {
        "samestep",
        f"{'-'.join(wheel.name.split('-')[:2])}.dist-info",
    }


@pytest.mark.parametrize(
    ("command", "expected", "said"),
    [
        (("verify", "before.py"), 1, "evaluation-inexact"),
        (("verify", "--fake-gpus", "before.py"), 1, "evaluation-inexact"),
        (("run", "-n", "2", "after.py"), 0, "final loss"),
        (("run", "-n", "2", "-m", "samestep.recipes.digits", "--epochs", "1"), 0, "held-out samples right"),
        (("doctor",), 0, "training would work"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_the_installed_command_works(installed, tmp_path, command, expected, said):
    pytest.importorskip("sklearn", reason="its digits are the examples' data")
    for side in ("before", "after"):
        shutil.copy(ROOT / "examples" / "moving" / "torchrun" / f"{side}.py", tmp_path)
    program = installed.parent / "samestep"
    code, text = call(program, *command, cwd=tmp_path, PATH=f"{installed.parent}:{os.environ['PATH']}")
    assert (code, said in text) == (expected, True), text
