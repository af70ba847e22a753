"""The commands in the docstrings of examples, and running them beside each other."""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PROGRAMS = ("samestep", "python", "torchrun", "mpiexec")
COMMAND = re.compile(rf"^(?:(node\d)\$ )?((?:{'|'.join(PROGRAMS)}) .*?)(?: {{2,}}.*)?$", re.MULTILINE)
TOGETHER = 2  # commands at a time
LONGEST = 150  # seconds
ON_RANKS = re.compile(r"samestep run -n (\d) (examples/\w+\.py)(.*)")  # a command that needs ranks and nothing else


@dataclass(frozen=True)
class Command:
    """One line of a docstring; `host` is the machine at whose prompt it stands."""

    line: str
    host: str | None = None

    def words(self) -> list[str]:
        """Returns the command with this interpreter's programs, and files by their whole path."""
        words = [str(ROOT / word) if word.startswith("examples/") else word for word in shlex.split(self.line)]
        return [str(Path(sys.executable).parent / word) if word in PROGRAMS else word for word in words]


def commands_of(example: Path) -> list[Command]:
    """Returns the commands of an example."""
    doc = ast.get_docstring(ast.parse(example.read_text(encoding="utf-8"))) or ""
    return [Command(found[2], found[1]) for found in COMMAND.finditer(doc)]


def run(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Runs a command in a folder of its own, with one thread a process, and returns it with all that it printed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}  # or it trains each rank alone
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            words,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            out, err = process.communicate(timeout=LONGEST)
        except subprocess.TimeoutExpired:
            process.terminate()  # a launcher ends its ranks; what is killed cannot
            out, err = process.communicate()
            err += f"\nit took longer than {LONGEST} s"
        return subprocess.CompletedProcess(words, process.returncode, out, err)


def main_of(script: str, arguments: Sequence[str], folder: str) -> str:
    """Runs a script within this process, which is a rank or alone, and returns what it printed."""
    printed, words, before = io.StringIO(), sys.argv, Path.cwd()
    sys.argv = [script, *arguments]
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(script, run_name="__main__")
    finally:
        sys.argv = words
        os.chdir(before)
    return printed.getvalue()


def run_on_ranks(ranks, script: Path, arguments: Sequence[str], folder: Path) -> str:
    """Runs a script on ranks that are there already; returns what they printed, as `samestep run` shows it."""
    texts = ranks(main_of, str(script), list(arguments), str(folder))
    return "".join(f"[rank {rank}] {line}" for rank, text in enumerate(texts) for line in text.splitlines(True))
