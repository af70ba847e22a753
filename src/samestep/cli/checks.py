"""Programs and files that a command is given: refused before anything starts, and written, whole or not at all."""

from __future__ import annotations

import argparse
import json
import os
import re
from pathlib import Path
from typing import Any

from samestep.errors import UsageError
from samestep.files import write_atomic
from samestep.launch.cpus import read_cores
from samestep.launch.output.console import say
from samestep.launch.rank.script import find_module
from samestep.launch.resources import busy_cores
from samestep.paths import default_run_path

HEAD = 512  # bytes of a file that tell what it is
BUSY = 0.25  # of the cores: a desktop uses less
SHELL = re.compile(rb"#!.*\b((?:ba|da|z|k)?sh)\b")


def check_outputs(options: argparse.Namespace, *names: str) -> None:
    """Sees before the training, rather than after it, whether the files of these options can be written."""
    for name in names:
        file: Path | None = getattr(options, name)
        if file is None:
            continue
        option = f"--{name.replace('_', '-')} {file}"
        if file.is_dir():
            raise UsageError(f"{option} is a directory: name a file")
        if not file.parent.is_dir():
            raise UsageError(f"{option} cannot be written: there is no directory {file.parent}; make it first")
        if not os.access(file if file.exists() else file.parent, os.W_OK):
            raise UsageError(f"{option} cannot be written: you may not write there; name another file")


def check_run_path(path: Path) -> None:
    """Sees whether a run directory can be made."""
    there = next(parent for parent in (path, *path.parents) if _exists(parent))
    if not there.is_dir():
        raise UsageError(
            f"the run directory {path} cannot be made: {there} is not a directory; name one with --run-dir"
        )
    if not os.access(there, os.W_OK | os.X_OK):
        raise UsageError(f"the run directory {path} cannot be made: {there} is read-only; name another with --run-dir")


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # no name that a file can have; making it will say so
        return False


def check_program(program: str, *, is_module: bool) -> None:
    """Raises UsageError where there is no such script or module."""
    if is_module:
        _check_module(program)
        return
    path = Path(program)
    if path.is_dir() and not (path / "__main__.py").exists():
        raise UsageError(f"{program} is a directory without a __main__.py: name a script")
    if not path.exists():
        hint = f"; for the module, `samestep run -m {program}`" if "/" not in program and path.suffix != ".py" else ""
        raise UsageError(f"there is no script {program} in {Path.cwd()}: check the path{hint}")
    if path.is_file() and (found := _other_language(path)) is not None:
        raise UsageError(f"{program} is {found}: name a Python script, and what it runs behind it")


def _other_language(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            begin = file.read(HEAD)
    except OSError:  # running it will say so
        return None
    shell = SHELL.match(begin)
    if shell is not None and b"python" not in begin:  # a shell script may be one that goes on in Python
        return f"a script for {shell[1].decode()}"
    is_archive = begin.startswith(b"PK")  # python runs those
    return "no text" if b"\0" in begin and not is_archive else None


def _check_module(name: str) -> None:
    spec = find_module(name)
    runnable = spec is None or spec.submodule_search_locations is None or find_module(f"{name}.__main__")
    if spec is None:
        hint = "a file needs no -m" if name.endswith(".py") else "check the name, and that it is installed"
        raise UsageError(f"there is no module {name}: {hint}")
    if not runnable:
        raise UsageError(f"{name} is a package without a __main__.py: name one of its modules")


def run_path(asked: Path | None, program: str) -> Path:
    """Returns the run directory, a new one."""
    if asked is None:
        return default_run_path(program)
    if _exists(asked / "run.json"):
        raise UsageError(f"{asked} holds another run already: name a new directory, or leave --run-dir out")
    return asked.absolute()


def warn_of_others() -> None:
    """Says, before times are measured, that other programs compute on the same cores."""
    cores = read_cores().usable
    busy = busy_cores(cores)
    if busy > BUSY * len(cores):
        say(
            f"warning: other programs keep {100 * busy / len(cores):.0f} % of the cores busy: what is measured now is "
            "slower than on an idle machine, and less certain"
        )


# --- what was found, for programs ------------------------------------------------------------------


def write_json(file: Path | None, told: Any, code: int = 0) -> int:
    """Writes it, if there is a file to write it to; returns the exit code, as :func:`write_text` does."""
    return code if file is None else write_text(file, f"{json.dumps(told, indent=2)}\n", code, option="--json")


def write_text(file: Path | None, text: str, code: int = 0, *, option: str) -> int:
    """Writes a file that an option names, if it names one; returns the exit code, `code`.

    If it cannot be written, a message says so, and a code of 0 becomes another: what an earlier command has left there
    is not taken for this one's.
    """
    if file is None:
        return code
    try:
        write_atomic(file, [text])
    except UsageError as error:
        say(f"error: {option} {error}")
        return code or error.exit_code
    return code
