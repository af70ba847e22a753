"""Two ranks take a step over every backend that this machine could use: what no list of versions can promise."""

from __future__ import annotations

import contextlib
import itertools
import json
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from samestep.doctor.finding import Finding, ok, pip, python, samestep
from samestep.doctor.software import cuda_of_torch, visible_gpus
from samestep.errors import SamestepError
from samestep.launch.hosts import mpiexec
from samestep.rankenv import fresh_environment, variable
from samestep.text import format_duration, plural

PROGRAM = "samestep.doctor.step"
BUILT = "torch's backends"
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGKILL, signal.SIGILL, signal.SIGFPE)
SIGNALS = {int(number): number.name for number in CRASHES}
REASONS = {int(signal.SIGBUS): ": /dev/shm is full", int(signal.SIGKILL): ": out of memory, or by hand"}
TIMEOUT = 60.0  # seconds for torch to be imported on a busy machine, and some steps
HANGS = "20"  # seconds after which it is told where a rank stands
MPI_TIMEOUT = 40.0  # seconds; nobody there tells of a hang


def check() -> Iterator[Finding]:
    ours = {"gloo": 2, "samestep": 2}  # the ranks that take the step
    if (gpus := visible_gpus()) and cuda_of_torch() != (0,):  # else torch's line says so
        ours["nccl"] = min(gpus, 2)  # two ranks would not share a GPU
    with tempfile.TemporaryDirectory(prefix="samestep-doctor-") as name, ThreadPoolExecutor(2) as pool:
        folder = Path(name)
        over_mpi = pool.submit(lambda: list(_mpi(folder)))
        steps = list(_run(folder, ours))
        yield from (line for line in steps if line.check != BUILT)
        yield from over_mpi.result()
        yield from (line for line in steps if line.check == BUILT)


def _run(folder: Path, backends: Mapping[str, int]) -> Iterator[Finding]:
    """Has `samestep run` start so many ranks for each backend.

    What comes behind a backend that fails, or takes another number of ranks, is taken in another run.
    """
    steps: list[dict[str, Any]] = []
    failures: dict[str, str] = {}
    for attempt in itertools.count():
        left = [name for name in backends if name not in failures and not any(s["backend"] == name for s in steps)]
        if not left:
            break
        ranks, place = backends[left[0]], folder / str(attempt)
        left = [name for name in left if backends[name] == ranks]
        options = ["-n", str(ranks), "--run-dir", f"{place}.run", "--json", f"{place}.json", "--no-events"]
        options += ["--hang-after", HANGS, "--on-hang", "stop"]
        words = [sys.executable, "-P", "-m", "samestep", "run", *options, "-m", PROGRAM, f"{place}.steps", *left]
        said = _said(words, TIMEOUT)
        taken = read_steps(Path(f"{place}.steps"))
        steps += taken
        if len(taken) < len(left):
            failures[left[len(taken)]] = read_failure(Path(f"{place}.json")) or said
    yield from judge(backends, steps, failures)
    yield from built(steps)


def _mpi(folder: Path) -> Iterator[Finding]:
    if find_spec("mpi4py") is None:
        return
    if variable("SLURM_JOB_ID") is not None:
        yield ok("step over mpi", "not taken inside a job of Slurm, whom mpiexec would ask for tasks of its own")
        return
    found = folder / "mpi"
    try:
        command = mpiexec.command(2, [sys.executable, "-P", "-m", PROGRAM, str(found), "mpi"])
    except SamestepError:
        return  # said of the software already
    said = _said(command, MPI_TIMEOUT)
    for line in judge({"mpi": 2}, read_steps(found), {"mpi": said}):
        effect = "training over MPI fails; over gloo it does not"
        yield line if line.level == "ok" else Finding(line.check, "warning", line.text, effect, line.fix)


def _said(words: Sequence[str], timeout: float) -> str:
    """Runs a command; returns its last line of an error, or why there is none."""
    try:
        done = subprocess.run(
            words, capture_output=True, errors="replace", timeout=timeout, check=False, env=fresh_environment()
        )
    except subprocess.TimeoutExpired:
        return f"did not end within {timeout:.0f} s"
    except OSError as error:
        return f"cannot be started: {error}"
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return lines[-1] if done.returncode and lines else ended(done.returncode)


def ended(code: int) -> str:
    """Returns what an exit code says: mpiexec gives a signal's bare number, a shell 128 more, Python its negative.

    >>> ended(3), ended(-9), ended(139)
    ('ended with code 3', 'ended by SIGKILL: out of memory, or by hand', 'ended by SIGSEGV')
    """
    for one in (-code, code - 128, code):
        if one in SIGNALS:
            return f"ended by {SIGNALS[one]}{REASONS.get(one, '')}"
    return f"ended with code {code}"


def read_steps(file: Path) -> list[dict[str, Any]]:
    """Returns what rank 0 has written; a torn last line is none."""
    steps: list[dict[str, Any]] = []
    with contextlib.suppress(ValueError, FileNotFoundError):
        for line in file.read_text(encoding="utf-8").splitlines():
            steps.append(json.loads(line))  # noqa: PERF401  (those before a torn one count)
    return steps


def read_failure(file: Path) -> str:
    """Returns, in a line, what `samestep run --json` says of a failure; "" where there was none."""
    try:
        failure = json.loads(file.read_text(encoding="utf-8"))["failure"]
    except (OSError, ValueError, KeyError):
        failure = None
    if not failure:
        return ""
    message = (failure["message"] or "").strip().partition("\n")[0]
    return f"rank {failure['rank']}: {failure['exception'] or 'failed'}: {message}".rstrip(": ")


def judge(
    backends: Mapping[str, int], steps: Sequence[dict[str, Any]], failures: Mapping[str, str]
) -> Iterator[Finding]:
    """Yields a line for each backend, given its number of ranks: how long its step took, or why there is none."""
    done = {step["backend"]: step for step in steps}
    for backend, ranks in backends.items():
        check = f"step over {backend}"
        step = done.get(backend)
        if step is None:
            fix = f"{by_hand(backend, ranks)}  # its whole traceback"
            yield Finding(check, "error", failures.get(backend, "no step"), "training fails with it", fix)
        elif step["ranks"] != ranks:
            effect = "every process trains alone, and nothing says so"
            text = f"{ranks} processes were started, and each finds itself in a world of {step['ranks']}"
            fix = pip("--force-reinstall", "mpi4py", "mpich") + "  # the mpiexec is of another MPI than mpi4py's"
            yield Finding(check, "error", text, effect, fix)
        elif not step["right"]:
            fix, text = pip("--force-reinstall", "torch"), "the gradient is not the mean of the ranks'"
            yield Finding(check, "error", text, "replicas diverge silently", fix)
        else:
            versions = "".join(f", {name.upper()} {step[name]}" for name in ("cuda", "nccl") if step.get(name))
            text = f"{plural(ranks, 'rank')}, right, {format_duration(step['seconds'])}"
            yield ok(check, text + (versions if backend == "nccl" else ""))


def by_hand(backend: str, ranks: int = 2) -> str:
    if backend == "mpi":
        return f"{shlex.quote(mpiexec.mpiexec())} -n 2 {python()} -m {PROGRAM} /dev/null mpi"
    return f"{samestep()} run -n {ranks} -m {PROGRAM} /dev/null {backend}"


def built(steps: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    """Yields what torch's own libraries are, as the rank that took a step has found them."""
    if steps:
        found = steps[-1]
        libraries = [f"gloo of {found['torch']}", f"NCCL {found['nccl']}" if found["nccl"] else "no NCCL"]
        libraries.append("MPI" if found["mpi"] else "no MPI of its own: mpi4py carries it")
        yield ok(BUILT, f"{', '.join(libraries)}; {found['openmp']}; {found['threads']} threads a rank")
