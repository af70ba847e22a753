"""The commands in the docstrings of examples, and running them beside each other."""

from __future__ import annotations

import ast
import os
import re
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
