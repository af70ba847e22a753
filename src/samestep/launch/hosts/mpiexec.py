"""The command that has mpiexec start the ranks, for `--mpi`: one task for each, and nothing bound."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from samestep.errors import UsageError

ANSWER_S = 20.0  # for mpiexec to say what it is


def mpiexec() -> str:
    """Returns the mpiexec that came with this Python, or else the one that is found on PATH."""
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        raise UsageError("there is no mpiexec here: pip install 'samestep[mpi]' brings one")
    return found


def command(ranks: int, words: Sequence[str], program: str | None = None) -> list[str]:
    program = mpiexec() if program is None else program
    return [program, *options(_version(program), is_root=os.geteuid() == 0), "-n", str(ranks), *words]


def options(version: str, *, is_root: bool) -> list[str]:
    """Returns the options that an mpiexec needs, by what it says of itself.

    >>> options("mpiexec (OpenRTE) 4.1.4", is_root=False)
    ['--bind-to', 'none', '--oversubscribe']
    >>> options("HYDRA build details: Version: 5.0.2", is_root=True)
    []
    """
    if "OpenRTE" not in version and "Open MPI" not in version:
        return []  # MPICH binds nothing; for Intel MPI there is a variable
    more = ["--oversubscribe"] if "OpenRTE" in version else ["--map-by", ":OVERSUBSCRIBE"]
    return ["--bind-to", "none", *more, *(["--allow-run-as-root"] if is_root else [])]


def _version(program: str) -> str:
    try:
        done = subprocess.run(
            [program, "--version"], capture_output=True, text=True, errors="replace", timeout=ANSWER_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"{program} --version does not answer: {error}") from error
    return " ".join(done.stdout.split())
