"""What is installed: python, torch, what starts ranks, and packages that contradict each other.

Versions that are known not to go together, though no package's own requirements say so, and `pip check` is silent:

    tensorboard <= 2.20    setuptools >= 82      imports pkg_resources, which setuptools no longer has
    torchvision, -audio    torch                 of another build (CPU, CUDA 12, CUDA 13): operators are missing
    nvidia-…-cu12          nvidia-…-cu13         write the same files: whichever was installed last is loaded
    torch for CUDA 13      driver < 580          CUDA cannot be started; CUDA 12 wants 525
    torch for CUDA 13      GPUs before Turing    no kernel for them, nor for Blackwell before CUDA 12.8
    Linux < 5.5            any                   processes that share memory may hang

Sources: tensorboard's issues 7003 and 7107; NVIDIA's "Minor Version Compatibility" of CUDA; PyTorch's issue 157517 and
RELEASE.md; accelerate's `check_kernel`.
"""

from __future__ import annotations

import functools
import itertools
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distribution, distributions, version
from importlib.util import find_spec
from pathlib import Path

from samestep._version import __version__
from samestep.doctor.finding import Finding, as_root, ok, pip, python
from samestep.errors import SamestepError
from samestep.launch import resources
from samestep.launch.hosts import mpiexec
from samestep.launch.hosts.transport import PACKAGES, program_named
from samestep.rankenv import variable

OLDEST_TORCH = (2, 11)
OURS = re.compile(r"torch|nvidia|triton|numpy|samestep|mpi4py|safetensors", re.IGNORECASE)  # whose conflicts matter
LAUNCHERS = {"ssh": "-V", "pdsh": "-V", "clush": "--version"}
SLURM = Path("/etc/slurm/slurm.conf")
SLOWEST = 8.0  # seconds for another program to answer
READING = 30.0  # seconds for pip to read what is installed: 2 on an idle machine
VERSIONS = "versions"
DRIVERS = {13: 580, 12: 525, 11: 450}  # the oldest driver of each CUDA
TURING, BLACKWELL = (7, 5), (10, 0)  # compute capabilities
FIRST_WITH_BLACKWELL = (12, 8)  # CUDA
OLDEST_LINUX = (5, 5)
TENSORBOARDS_LAST = (2, 20)  # that imports pkg_resources
SETUPTOOLS_FIRST = (82,)  # without it

Installed = Callable[[str], str | None]
visible_gpus = functools.cache(resources.visible_gpus)  # asks nvidia-smi, which may take a second


def check() -> Iterator[Finding]:
    yield ok("python", f"{platform.python_version()} ({platform.python_compiler()}), {sys.executable}")
    system = platform.uname()
    yield ok("system", f"{system.system} {system.release} {system.machine}, {' '.join(platform.libc_ver())}")
    yield torch(installed("torch"), visible_gpus())
    yield ok("samestep", __version__)
    yield from conflicts(said_by([sys.executable, "-m", "pip", "check", "--disable-pip-version-check"], READING))
    yield from _mpi()
    yield from _launchers()


def torch(version_text: str | None, gpus: int, cuda: tuple[int, ...] | None = None) -> Finding:
    """Judges torch's version, None where there is none; `cuda` is by default what torch's own file says."""
    if version_text is None:
        return Finding("torch", "error", "is not installed", "nothing trains", pip("torch"))
    if numbers(version_text)[:2] < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        effect = "samestep needs gradient hooks and process-group calls that it lacks"
        return Finding("torch", "error", version_text, effect, pip("--upgrade", f"torch>={oldest}"))
    cuda = cuda_of_torch() if cuda is None else cuda
    if gpus and ("+cpu" in version_text or cuda == (0,)):
        fix = pip("--force-reinstall", "torch") + "  # PyPI's build for Linux has CUDA"
        effect = "the GPU here stays idle" if gpus == 1 else f"the {gpus} GPUs here stay idle"
        return Finding("torch", "warning", f"{version_text}, a CPU build", effect, fix)
    return ok("torch", f"{version_text}, {'for CUDA ' + '.'.join(map(str, cuda)) if cuda[0] else 'without CUDA'}")


def said_by(command: Sequence[str], timeout: float = SLOWEST) -> tuple[int, str]:
    """Returns what a program ends with and what it says; -1 where there is none, or it does not end."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, errors="replace")
    except (OSError, subprocess.TimeoutExpired) as error:
        return -1, str(error)
    return done.returncode, (done.stdout + done.stderr).strip()


def conflicts(checked: tuple[int, str]) -> Iterator[Finding]:
    """Reads what `pip check` says of packages that torch and samestep stand on."""
    if checked[0] < 0 or "No module named pip" in checked[1]:
        text, fix = "not checked: pip check does not answer here", f"{python()} -m ensurepip"
        yield Finding("packages", "note", text, "packages that contradict each other are not found", fix)
        return
    found = [text for text in checked[1].splitlines() if OURS.search(text)] if checked[0] > 0 else []
    for text in found:
        fix = upgrade_command(text)
        yield Finding("packages", "warning", text, "imports fail, or calls crash in native code", fix)
    if not found:
        yield ok("packages", "those that torch and samestep stand on agree")


def upgrade_command(text: str) -> str:
    """Returns the command after which two packages agree: the one that asks is changed, and the one asked for stays.

    >>> conflict = "torchvision 0.27.0 has requirement torch==2.12.0, but you have torch 2.13.0."
    >>> upgrade_command(conflict).partition(" pip ")[2]
    'install --upgrade torchvision torch==2.13.0'
    >>> upgrade_command("samestep 0.1.0 requires numpy>=2, which is not installed.").partition(" pip ")[2]
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
        text, fix = f"{program} --version fails: {named}", pip("--force-reinstall", "mpich")
        yield Finding("MPI", "warning", text, "samestep run --mpi does not start", fix)
        return
    release = re.search(r"(?:Version:|Open MPI\)|Intel.*Version)\s*(\S+)", said)
    family = "Open MPI" if "Open MPI" in said or "OpenRTE" in said else "MPICH or Intel MPI"
    yield ok("MPI", f"{text}, {family} {release[1] if release else named} ({Path(program).name})")


def _launchers() -> Iterator[Finding]:
    missing = []
    for name, option in LAUNCHERS.items():
        program = program_named(name)
        if program is None:
            missing.append(name)
            continue
        code, said = said_by([program, option])
        first = said.splitlines()[0].strip() if said else "?"
        if code == 0:
            yield ok(name, first)
        else:
            text, fix = f"{name} {option} fails: {first}", as_root(f"apt-get install --reinstall {PACKAGES[name]}")
            yield Finding(name, "warning", text, "hosts cannot be reached with it", fix)
    if shutil.which("sinfo"):
        configured = SLURM.exists() or variable("SLURM_CONF") is not None
        code, said = said_by(["sinfo", "--version"])  # which reads the configuration first
        release = said.partition("\n")[0] if code == 0 else "installed"
        yield slurm(said_by(["sinfo", "--noheader", "--format=%D %T"]), configured=configured, release=release)
    else:
        missing.append("Slurm")
    if missing:
        yield ok("not here", f"{', '.join(missing)}: more ways to start ranks, of which none is needed")


def slurm(answer: tuple[int, str], *, configured: bool, release: str = "installed") -> Finding:
    code, said = answer
    if code != 0 and not configured:
        return ok("Slurm", f"{release}, not configured: there is no {SLURM}")
    if code != 0:
        first = said.splitlines()[0] if said else "no answer"
        fix = "scontrol ping  # who answers; there: systemctl restart slurmctld"
        return Finding("Slurm", "warning", f"sinfo fails: {first}", "jobs cannot be queued", fix)
    states = [text.split() for text in said.splitlines() if text]
    usable = sum(int(count) for count, state in states if not re.search(r"down|drain|fail|unk", state))
    text = ", ".join(f"{count} {state}" for count, state in states) or "no nodes"
    if usable == 0:
        fix = "sinfo -R  # why; then: scontrol update NodeName=NAME State=RESUME"
        return Finding("Slurm", "warning", f"{release}, nodes: {text}", "jobs wait for ever", fix)
    return ok("Slurm", f"{release}, nodes: {text}")


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def check_versions() -> Iterator[Finding]:
    yield from packages(installed)
    yield from kernel(platform.release())
    yield from overwritten_files(_files())


def packages(of: Installed) -> Iterator[Finding]:
    tensorboard, tools, torch = of("tensorboard"), of("setuptools"), of("torch")
    if tensorboard and tools and numbers(tensorboard)[:2] <= TENSORBOARDS_LAST and numbers(tools) >= SETUPTOOLS_FIRST:
        effect, fix = "tensorboard ends with: No module named 'pkg_resources'", pip("setuptools<82", "tensorboard")
        yield Finding(VERSIONS, "warning", f"tensorboard {tensorboard} beside setuptools {tools}", effect, fix)
    for name in ("torchvision", "torchaudio"):
        other = of(name)
        if torch and other and incompatible_builds(build(torch), build(other), platform.machine()):
            text = f"{name} {other} beside torch {torch}: of another build"
            effect = f"import {name} fails: an operator does not exist, or a library is not found"
            fix = pip("--force-reinstall", "--no-deps", name, *index(build(torch)))
            yield Finding(VERSIONS, "warning", text, effect, fix)


def build(version_text: str) -> str:
    """Returns what a version says of its build; those on PyPI say nothing.

    >>> build("2.13.0+cpu"), build("0.28.0+cu130"), build("2.13.0")
    ('cpu', 'cu130', '')
    """
    return version_text.partition("+")[2]


def incompatible_builds(one: str, other: str, machine: str) -> bool:
    """Whether two builds cannot work together: for the CPU and for CUDA, or for CUDA 12 and 13.

    >>> [incompatible_builds("cpu", "", machine) for machine in ("x86_64", "aarch64")]
    [True, False]
    >>> [incompatible_builds(one, other, "x86_64") for one, other in (("", "cu130"), ("cu126", "cu130"))]
    [False, True]
    """
    on_pypi = "cu" if machine == "x86_64" else "cpu"  # of which CUDA is not told
    one, other = (each[: len("cu12")] if each.startswith("cu") else each or on_pypi for each in (one, other))
    return one != other and ("cpu" in {one, other} or "cu" not in {one, other})


def index(of: str) -> list[str]:
    """Returns where pip finds a build; PyPI has the one without a word for it."""
    return ["--index-url", f"https://download.pytorch.org/whl/{of}"] if of else []


def numbers(version_text: str) -> tuple[int, ...]:
    """Returns the numbers of a release.

    >>> numbers("2.11.0a0+git1")
    (2, 11, 0)
    """
    found = re.match(r"\d+(\.\d+)*", version_text)
    return tuple(map(int, found[0].split("."))) if found else ()


def kernel(release: str) -> Iterator[Finding]:
    if (0,) < numbers(release)[:2] < OLDEST_LINUX:
        fix = as_root("apt-get install --only-upgrade linux-image-generic") + "  # or your distribution's; then reboot"
        text = f"Linux {release} is older than 5.5"
        yield Finding(VERSIONS, "note", text, "processes may hang, as accelerate warns", fix)


def _files() -> dict[str, set[str]]:
    names = {one.metadata["Name"] for one in distributions() if (one.metadata["Name"] or "").startswith("nvidia-")}
    return {name: {str(file) for file in distribution(name).files or () if ".so" in file.name} for name in names}


def overwritten_files(files: Mapping[str, set[str]]) -> Iterator[Finding]:
    for first, second in itertools.combinations(sorted(files), 2):
        if both := files[first] & files[second]:
            text = f"{first} and {second} both wrote {min(both)}"
            effect = "torch loads whichever was installed last: calls fail, or crash in native code"
            is_second = re.search(rf"-cu{cuda_of_torch()[0] or 0}$", second)
            keep, drop = (second, first) if is_second else (first, second)
            fix = f"{python()} -m pip uninstall -y {drop} && {pip('--force-reinstall', '--no-deps', keep)}"
            yield Finding(VERSIONS, "warning", text, effect, fix)


def cuda_of_torch() -> tuple[int, ...]:
    """Returns the CUDA that torch was built for, (0,) for none; from its file, since importing torch takes long."""
    found = find_spec("torch")
    if found is None or found.origin is None:
        return (0,)
    try:
        text = Path(found.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return (0,)
    line = re.search(r"^cuda\b[^=]*= *'([\d.]+)'", text, re.MULTILINE)
    return numbers(line[1]) if line else (0,)


def with_driver(cuda: tuple[int, ...], driver: str, capabilities: Mapping[str, str]) -> Iterator[Finding]:
    """Yields what torch's CUDA, the driver and the GPUs' compute capabilities make of each other.

    They are told as (13, 0), "550.54.15" and {"NVIDIA H100": "9.0"}.
    """
    name_of_cuda, oldest = ".".join(map(str, cuda)), DRIVERS.get(cuda[0])
    if oldest and (0,) < numbers(driver) < (oldest,):
        effect = "torch.cuda.is_available() is False, or: 'the NVIDIA driver on your system is too old'"
        runs = "cu126" if numbers(driver) >= (DRIVERS[12],) else "cpu"
        fix = pip("--force-reinstall", "torch", *index(runs))
        text = f"torch for CUDA {name_of_cuda} wants driver {oldest} or newer, and this one is {driver}"
        yield Finding(VERSIONS, "error", text, effect, fix + "  # or a newer driver")
    for name, capability in capabilities.items():
        known = numbers(capability)
        too_old, too_new = cuda >= (13,) and known < TURING, cuda < FIRST_WITH_BLACKWELL and known >= BLACKWELL
        if cuda[0] and known and (too_old or too_new):
            text = f"torch for CUDA {name_of_cuda} has no kernels for {name} (compute capability {capability})"
            effect = "every call ends with: 'no kernel image is available for execution on the device'"
            fix = pip("--force-reinstall", "torch", *index("cu126" if too_old else "cu128"))
            yield Finding(VERSIONS, "error", text, effect, fix)
