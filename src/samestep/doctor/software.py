"""What is installed: python, torch, what starts ranks, and packages that contradict each other."""

from __future__ import annotations

import functools
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from samestep._version import __version__
from samestep.doctor.fixes import as_root, pip, python
from samestep.doctor.line import Finding, ok
from samestep.doctor.pairs import cuda_of_torch, installed
from samestep.errors import SamestepError
from samestep.launch import resources
from samestep.launch.hosts import mpiexec
from samestep.launch.hosts.transport import PACKAGES, program_named
from samestep.rankenv import variable

__all__: list[str] = []

OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 11)
OURS = re.compile(r"torch|nvidia|triton|numpy|samestep|mpi4py|safetensors", re.IGNORECASE)  # whose quarrels matter
STARTERS = {"ssh": "-V", "pdsh": "-V", "clush": "--version"}
SLURM = Path("/etc/slurm/slurm.conf")
SLOWEST = 8.0  # seconds for another program to answer
READING = 30.0  # seconds for pip to read what is installed: 2 on an idle machine

visible_gpus = functools.cache(resources.visible_gpus)  # asks nvidia-smi, which may take a second


def look() -> Iterator[Finding]:
    """Yields a line for each of them."""
    yield _python()
    yield ok(
        "system", f"{platform.system()} {platform.release()} {platform.machine()}, {' '.join(platform.libc_ver())}"
    )
    yield torch(installed("torch"), visible_gpus())
    yield ok("samestep", __version__)
    yield from quarrels(said_by([sys.executable, "-m", "pip", "check", "--disable-pip-version-check"], READING))
    yield from _mpi()
    yield from _starters()


def _python() -> Finding:
    text = f"{platform.python_version()} ({platform.python_compiler()}), {sys.executable}"
    if sys.version_info[:2] < OLDEST_PYTHON:
        fix = f"{pip('uv')} && {python()} -m uv venv --python 3.12"
        return Finding("python", "error", text, "samestep does not start", fix)
    return ok("python", text)


def torch(told: str | None, gpus: int, cuda: tuple[int, ...] | None = None) -> Finding:
    """Judges torch's version beside what the machine has.

    Args:
        told: its version; None where there is none.
        gpus: how many there are.
        cuda: that it was built for; as its own file says by default.
    """
    if told is None:
        return Finding("torch", "error", "is not installed", "nothing trains", pip("torch"))
    numbers = tuple(int(part) for part in re.findall(r"\d+", told)[:2])
    if numbers < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        effect = "samestep needs gradient hooks and process-group calls that it lacks"
        return Finding("torch", "error", told, effect, pip("--upgrade", f"torch>={oldest}"))
    cuda = cuda_of_torch() if cuda is None else cuda
    if gpus and ("+cpu" in told or cuda == (0,)):
        fix = pip("--force-reinstall", "torch") + "  # PyPI's build for Linux has CUDA"
        effect = "the GPU here stays idle" if gpus == 1 else f"the {gpus} GPUs here stay idle"
        return Finding("torch", "warning", f"{told}, a CPU build", effect, fix)
    return ok("torch", f"{told}, {'for CUDA ' + '.'.join(map(str, cuda)) if cuda[0] else 'without CUDA'}")


def said_by(command: Sequence[str], patience: float = SLOWEST) -> tuple[int, str]:
    """Returns what a program ends with and what it says; -1 where there is none, or it does not end."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=patience, check=False, errors="replace")
    except (OSError, subprocess.TimeoutExpired) as error:
        return -1, str(error)
    return done.returncode, (done.stdout + done.stderr).strip()


def quarrels(checked: tuple[int, str]) -> Iterator[Finding]:
    """Reads what `pip check` says of packages that torch and samestep stand on."""
    if checked[0] < 0 or "No module named pip" in checked[1]:
        effect = "packages that contradict each other are not found"
        fix = f"{python()} -m ensurepip"
        yield Finding("packages", "note", "not checked: pip check does not answer here", effect, fix)
        return
    found = [text for text in checked[1].splitlines() if OURS.search(text)] if checked[0] > 0 else []
    for text in found:
        effect = "imports fail, or calls crash in native code"
        yield Finding("packages", "warning", text, effect, agreeing(text))
    if not found:
        yield ok("packages", "those that torch and samestep stand on agree")


def agreeing(text: str) -> str:
    """Returns the command after which two packages agree: the one that asks is changed, and the one asked for stays.

    >>> agreeing("torchvision 0.27.0 has requirement torch==2.12.0, but you have torch 2.13.0.").partition(" pip ")[2]
    'install --upgrade torchvision torch==2.13.0'
    >>> agreeing("samestep 0.1.0 requires numpy>=2, which is not installed.").partition(" pip ")[2]
    "install 'numpy>=2'"
    """
    asks = text.partition(" ")[0]
    if missing := re.search(r" requires (.+), which is not installed", text):
        return pip(missing[1])
    if have := re.search(r", but you have (\S+) (\S+?)\.?$", text):
        return pip("--upgrade", asks, f"{have[1]}=={have[2].partition('+')[0]}")
    return pip("--force-reinstall", asks)


def _mpi() -> Iterator[Finding]:
    if find_spec("mpi4py") is None:
        return
    text = f"mpi4py {installed('mpi4py')}"
    try:
        program = mpiexec.mpiexec()
    except SamestepError:
        yield Finding("MPI", "note", f"{text}, without mpiexec", "samestep run --mpi does not start", pip("mpich"))
        return
    code, said = said_by([program, "--version"])
    named = next((line.strip() for line in said.splitlines() if line.strip()), "")
    if code != 0:
        effect = "samestep run --mpi does not start"
        yield Finding(
            "MPI", "warning", f"{program} --version fails: {named}", effect, pip("--force-reinstall", "mpich")
        )
        return
    release = re.search(r"(?:Version:|Open MPI\)|Intel.*Version)\s*(\S+)", said)
    family = "Open MPI" if "Open MPI" in said or "OpenRTE" in said else "MPICH or Intel MPI"
    yield ok("MPI", f"{text}, {family} {release[1] if release else named} ({Path(program).name})")


def _starters() -> Iterator[Finding]:
    """What starts ranks on other hosts."""
    missing = []
    for name, option in STARTERS.items():
        program = program_named(name)
        if program is None:
            missing.append(name)
            continue
        code, said = said_by([program, option])
        first = said.splitlines()[0].strip() if said else "?"
        if code != 0:
            effect = "hosts cannot be reached with it"
            yield Finding(
                name,
                "warning",
                f"{name} {option} fails: {first}",
                effect,
                as_root(f"apt-get install --reinstall {PACKAGES[name]}"),
            )
        else:
            yield ok(name, first)
    if shutil.which("sinfo"):
        configured = SLURM.exists() or variable("SLURM_CONF") is not None
        code, said = said_by(["sinfo", "--version"])  # which reads the configuration first
        release = said.partition("\n")[0] if code == 0 else "installed"
        yield slurm(said_by(["sinfo", "--noheader", "--format=%D %T"]), configured=configured, release=release)
    else:
        missing.append("Slurm")
    if missing:
        yield ok("not here", f"{', '.join(missing)}: more ways to start ranks, of which none is needed")


def slurm(asked: tuple[int, str], *, configured: bool, release: str = "installed") -> Finding:
    """Judges what sinfo says of the nodes, and of its own release."""
    code, said = asked
    if code != 0 and not configured:
        return ok("Slurm", f"{release}, not configured: there is no {SLURM}")
    if code != 0:
        first = said.splitlines()[0] if said else "no answer"
        effect = "jobs cannot be queued"
        return Finding(
            "Slurm",
            "warning",
            f"sinfo fails: {first}",
            effect,
            "scontrol ping  # who answers; there: systemctl restart slurmctld",
        )
    states = [text.split() for text in said.splitlines() if text]
    usable = sum(int(count) for count, state in states if not re.search(r"down|drain|fail|unk", state))
    text = ", ".join(f"{count} {state}" for count, state in states) or "no nodes"
    if usable == 0:
        fix = "sinfo -R  # why; then: scontrol update NodeName=NAME State=RESUME"
        return Finding("Slurm", "warning", f"{release}, nodes: {text}", "jobs wait for ever", fix)
    return ok("Slurm", f"{release}, nodes: {text}")
