"""Two ranks take a step over every backend that this machine could use: what no list of versions can promise."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from samestep.doctor.line import Line, fine
from samestep.errors import SamestepError
from samestep.launch import mpiexec
from samestep.launch.devices import visible_gpus
from samestep.rankenv import fresh_environment, variable
from samestep.reporting.words import seconds

__all__: list[str] = []

PROGRAM = "samestep.doctor.step"
PATIENCE = 60.0  # seconds for torch to be imported on a busy machine, and some steps
HANGS = "20"  # seconds after which it is told where a rank stands


def look() -> Iterator[Line]:
    """Yields a line for each backend."""
    gpus = visible_gpus()
    ours = ["gloo", "samestep", *(["nccl"] if gpus else [])]
    with tempfile.TemporaryDirectory(prefix="samestep-doctor-") as name, ThreadPoolExecutor(2) as pool:
        folder = Path(name)
        over_mpi = pool.submit(lambda: list(_mpi(folder)))
        yield from _run(folder, ours, 1 if gpus == 1 else 2)
        yield from over_mpi.result()


def _run(folder: Path, backends: Sequence[str], ranks: int) -> Iterator[Line]:
    """Has `samestep run` start the ranks: one on a machine with one GPU, which two would not share."""
    json_file, found = folder / "run.json", folder / "steps"
    options = ["-n", str(ranks), "--run-dir", str(folder / "run"), "--json", str(json_file), "--no-events"]
    options += ["--hang-after", HANGS, "--on-hang", "stop"]
    words = [sys.executable, "-P", "-m", "samestep", "run", *options, "-m", PROGRAM, str(found), *backends]
    said = _said(words)
    failure = read_failure(json_file) or said
    yield from judge(backends, read_steps(found), failure)


def _mpi(folder: Path) -> Iterator[Line]:
    if find_spec("mpi4py") is None:
        return
    if variable("SLURM_JOB_ID") is not None:
        yield fine("step over mpi", "not taken inside a job of Slurm, whom mpiexec would ask for tasks of its own")
        return
    found = folder / "mpi"
    try:
        command = mpiexec.command(2, [sys.executable, "-P", "-m", PROGRAM, str(found), "mpi"])
    except SamestepError:
        return  # said of the software already
    said = _said(command)
    for line in judge(["mpi"], read_steps(found), said):
        effect = "training over MPI fails; over gloo it does not"
        yield line if line.level == "fine" else Line(line.about, "warning", line.text, effect, line.mend)


def _said(words: Sequence[str]) -> str:
    """Runs a command; returns its last line of an error, or why there is none."""
    try:
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
            errors="replace",
            env=fresh_environment(),
        )
    except subprocess.TimeoutExpired:
        return f"did not end within {PATIENCE:.0f} s"
    except OSError as error:
        return f"cannot be started: {error}"
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return lines[-1] if done.returncode and lines else f"ended with code {done.returncode}"


def read_steps(file: Path) -> list[dict[str, Any]]:
    """Returns what rank 0 has written; a torn last line is none."""
    if not file.exists():
        return []
    steps = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            steps.append(json.loads(line))
        except ValueError:
            break
    return steps


def read_failure(file: Path) -> str:
    """Returns, in a line, what `samestep run --json` says of a failure; "" where there was none."""
    try:
        failure = json.loads(file.read_text(encoding="utf-8"))["failure"]
    except (OSError, ValueError, KeyError):
        return ""
    if not failure:
        return ""
    message = (failure["message"] or "").strip().splitlines()
    return f"rank {failure['rank']}: {failure['exception'] or 'failed'}: {message[0] if message else ''}".rstrip(": ")


def judge(backends: Sequence[str], steps: Sequence[dict[str, Any]], failure: str) -> Iterator[Line]:
    """Yields a line for each backend: how long its step took, or why there is none."""
    done = {step["backend"]: step for step in steps}
    for backend in backends:
        about = f"step over {backend}"
        step = done.get(backend)
        if step is None:
            before = next((other for other in backends if other not in done), backend)
            text = failure if before == backend else f"not reached, because of {before}"
            mend = "the same alone, with its whole traceback: " + by_hand(backend)
            yield Line(about, "error", text, "training fails with it", mend)
        elif not step["right"]:
            effect = "replicas part, and nothing says so"
            text = "the gradient is not the mean of the ranks'"
            yield Line(about, "error", text, effect, "install another build of torch, and its libraries")
        else:
            versions = "".join(f", {name.upper()} {step[name]}" for name in ("cuda", "nccl") if step.get(name))
            ranks = "1 rank" if step["ranks"] == 1 else f"{step['ranks']} ranks"
            yield fine(about, f"{ranks}, right, {seconds(step['seconds'])}{versions if backend == 'nccl' else ''}")


def by_hand(backend: str) -> str:
    """Returns the command that takes the step again."""
    if backend == "mpi":
        return f"mpiexec -n 2 python -m {PROGRAM} /dev/null mpi"
    return f"samestep run -n 2 -m {PROGRAM} /dev/null {backend}"
