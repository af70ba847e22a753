"""What is installed: python, torch, what starts ranks, and packages that contradict each other."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from samestep._version import __version__
from samestep.doctor.line import Line, fine
from samestep.errors import SamestepError
from samestep.launch import mpiexec
from samestep.launch.devices import visible_gpus
from samestep.launch.transport import program_named
from samestep.rankenv import variable

__all__: list[str] = []

OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 11)
OURS = re.compile(r"torch|nvidia|triton|numpy|samestep|mpi4py|safetensors", re.IGNORECASE)  # whose quarrels matter
STARTERS = {"ssh": "-V", "pdsh": "-V", "clush": "--version"}
SLURM = Path("/etc/slurm/slurm.conf")
SLOWEST = 8.0  # seconds for another program to answer


def look() -> Iterator[Line]:
    """Yields a line for each of them."""
    yield _python()
    yield torch(_installed("torch"), visible_gpus())
    yield fine("samestep", __version__)
    yield from quarrels(said_by([sys.executable, "-m", "pip", "check", "--disable-pip-version-check"]))
    yield from _mpi()
    yield from _starters()


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _python() -> Line:
    text = f"{platform.python_version()}, {sys.executable}"
    if sys.version_info[:2] < OLDEST_PYTHON:
        return Line("python", "error", text, "samestep does not start", "install Python 3.11 or newer")
    return fine("python", text)


def torch(installed: str | None, gpus: int) -> Line:
    """Judges torch's version beside what the machine has."""
    if installed is None:
        return Line("torch", "error", "is not installed", "nothing trains", "pip install torch")
    numbers = tuple(int(part) for part in re.findall(r"\d+", installed)[:2])
    if numbers < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        effect = "samestep needs gradient hooks and process-group calls that it lacks"
        return Line("torch", "error", installed, effect, f"pip install 'torch>={oldest}'")
    if gpus and "+cpu" in installed:
        mend = "pip install --force-reinstall torch (a build with CUDA)"
        return Line("torch", "warning", f"{installed}, a CPU build", f"the {gpus} GPUs here stay idle", mend)
    return fine("torch", installed)


def said_by(command: Sequence[str]) -> tuple[int, str]:
    """Returns what a program ends with and what it says; -1 where there is none, or it does not end."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SLOWEST, check=False, errors="replace")
    except (OSError, subprocess.TimeoutExpired) as error:
        return -1, str(error)
    return done.returncode, (done.stdout + done.stderr).strip()


def quarrels(checked: tuple[int, str]) -> Iterator[Line]:
    """Reads what `pip check` says of packages that torch and samestep stand on."""
    found = [text for text in checked[1].splitlines() if OURS.search(text)] if checked[0] > 0 else []
    for text in found:
        if "No module named pip" not in text:
            effect = "imports fail, or calls crash in native code"
            yield Line("packages", "warning", text, effect, "install the versions that it names, in a new environment")
    if checked[0] == 0:
        yield fine("packages", "those that torch and samestep stand on agree")


def _mpi() -> Iterator[Line]:
    if find_spec("mpi4py") is None:
        return
    text = f"mpi4py {_installed('mpi4py')}"
    try:
        program = mpiexec.mpiexec()
    except SamestepError as error:
        yield Line("MPI", "note", f"{text}, without mpiexec", "samestep run --mpi does not start", str(error))
        return
    code, said = said_by([program, "--version"])
    named = next((line.strip() for line in said.splitlines() if line.strip()), "")
    if code != 0:
        effect = "samestep run --mpi does not start"
        yield Line("MPI", "warning", f"{program} --version fails: {named}", effect, "pip install 'samestep[mpi]'")
        return
    release = re.search(r"(?:Version:|Open MPI\)|Intel.*Version)\s*(\S+)", said)
    family = "Open MPI" if "Open MPI" in said or "OpenRTE" in said else "MPICH or Intel MPI"
    yield fine("MPI", f"{text}, {family} {release[1] if release else named} ({Path(program).name})")


def _starters() -> Iterator[Line]:
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
            yield Line(name, "warning", f"{name} {option} fails: {first}", effect, f"reinstall {name}")
        else:
            yield fine(name, first)
    if shutil.which("sinfo"):
        configured = SLURM.exists() or variable("SLURM_CONF") is not None
        yield slurm(said_by(["sinfo", "--noheader", "--format=%D %T"]), configured=configured)
    else:
        missing.append("Slurm")
    if missing:
        yield fine("not here", f"{', '.join(missing)}: more ways to start ranks, of which none is needed")


def slurm(asked: tuple[int, str], *, configured: bool) -> Line:
    """Judges what sinfo says of the nodes."""
    code, said = asked
    if code != 0 and not configured:
        return fine("Slurm", f"installed, and not configured: there is no {SLURM}")
    if code != 0:
        first = said.splitlines()[0] if said else "no answer"
        effect = "jobs cannot be queued"
        return Line("Slurm", "warning", f"sinfo fails: {first}", effect, "scontrol ping; systemctl status slurmctld")
    states = [text.split() for text in said.splitlines() if text]
    usable = sum(int(count) for count, state in states if not re.search(r"down|drain|fail|unk", state))
    text = ", ".join(f"{count} {state}" for count, state in states) or "no nodes"
    if usable == 0:
        return Line("Slurm", "warning", f"nodes: {text}", "jobs wait for ever", "scontrol show node; scontrol update")
    return fine("Slurm", f"nodes: {text}")
