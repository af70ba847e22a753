"""The batch script with which Slurm starts a run, and goes on with it when it had to make room.

    sbatch  ->  batch shell on the first node  ->  srun  ->  one `samestep run` on each node  ->  its ranks
                   75: scontrol requeue            |
                   else: the run's code            +-- USR1 a minute before the time limit, SIGTERM when preempted:
                                                       all ranks save the same step, and every task leaves with 75

srun alone would report the highest code of its tasks, which is that of a victim that it has ended itself (143); here
all tasks leave with the run's own.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from samestep.errors import UsageError

__all__: list[str] = []

WARNING = 60  # seconds before the limit; Slurm sends it up to a minute earlier


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What is to be queued.

    Attributes:
        name: the job's.
        nodes: how many.
        options: of sbatch, as one would type them: "--partition=gpu --time=2:00:00 --gpus-per-node=4".
        run_dir: parent and beginning of the run directory's name; the job's number and its restarts are added.
        run: options of `samestep run`.
        program: the script with its arguments.
        directory: where all of it happens.
    """

    name: str
    nodes: int
    options: str
    run_dir: Path
    run: tuple[str, ...]
    program: tuple[str, ...]
    directory: Path

    def script(self) -> str:
        """Returns the batch script."""
        return "\n".join([*self._head(), "", *self._body(), ""])

    def _head(self) -> list[str]:
        usual = {
            "--job-name": self.name,
            "--nodes": str(self.nodes),
            "--ntasks-per-node": "1",
            "--output": f"{self.run_dir}-%j.out",
            "--open-mode": "append",
            "--signal": f"USR1@{WARNING}",
        }
        asked = _split(self.options)
        given = {option.partition("=")[0] for option in asked}
        lines = [f"{name}={shlex.quote(value)}" for name, value in usual.items() if name not in given]
        return ["#!/bin/bash", *(f"#SBATCH {line}" for line in (*lines, "--requeue", *asked))]

    def _body(self) -> list[str]:
        run = shlex.join([sys.executable, "-P", "-m", "samestep", "run", *self.run])
        place = f'--run-dir {shlex.quote(str(self.run_dir))}-"$SLURM_JOB_ID"-"${{SLURM_RESTART_COUNT:-0}}"'
        return [
            f"cd {shlex.quote(str(self.directory))}",
            " \\\n    ".join(["srun --kill-on-bad-exit=1 --cpu-bind=none", run, place, shlex.join(self.program)]),
            "code=$?",
            'if [ "$code" -eq 75 ]; then  # it made room, and has saved',
            '    scontrol requeue "$SLURM_JOB_ID"',
            "fi",
            'exit "$code"',
        ]


def _split(options: str) -> list[str]:
    try:
        words = shlex.split(options)
    except ValueError as error:
        raise UsageError(f"--sbatch-args {options!r} cannot be read: {error}") from None
    bare = [word for word in words if not word.startswith("-")]
    if bare:
        raise UsageError(f"--sbatch-args: write {bare[0]!r} together with its option, as in --time=2:00:00")
    return words


def submit(batch: Batch) -> str:
    """Queues it and returns the job's number.

    Raises:
        UsageError: Slurm is not here, or does not take it; passes on what it says.
    """
    batch.run_dir.parent.mkdir(parents=True, exist_ok=True)
    command: Sequence[str] = ["sbatch", "--parsable"]
    try:
        done = subprocess.run(command, input=batch.script(), capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise UsageError("sbatch is not here: run this on a login node of a Slurm cluster") from None
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or ["it gave no reason"]
        raise UsageError(f"Slurm does not take the job: {said[-1]}")
    return done.stdout.strip().partition(";")[0]
