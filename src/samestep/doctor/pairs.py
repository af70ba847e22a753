"""Versions that are known not to go together, though no package's own requirements say so: `pip check` is silent.

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

import platform
import re
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, distribution, distributions, version
from importlib.util import find_spec
from pathlib import Path

from samestep.doctor.fixes import as_root, pip, python
from samestep.doctor.line import Finding

__all__: list[str] = []

Installed = Callable[[str], str | None]

CHECK = "versions"
DRIVERS = {13: 580, 12: 525, 11: 450}  # the oldest driver of each CUDA
TURING, BLACKWELL = (7, 5), (10, 0)  # compute capabilities
FIRST_WITH_BLACKWELL = (12, 8)  # CUDA
OLDEST_LINUX = (5, 5)
TENSORBOARDS_LAST = (2, 20)  # that imports pkg_resources
SETUPTOOLS_FIRST = (82,)  # without it


def installed(package: str) -> str | None:
    """Returns a package's version; None where there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def look() -> Iterator[Finding]:
    """Yields the pairs that were found."""
    yield from packages(installed)
    yield from kernel(platform.release())
    yield from overwritten(_files())


def packages(of: Installed) -> Iterator[Finding]:
    """Yields pairs of Python packages."""
    board, tools, torch = of("tensorboard"), of("setuptools"), of("torch")
    if board and tools and numbers(board)[:2] <= TENSORBOARDS_LAST and numbers(tools) >= SETUPTOOLS_FIRST:
        effect = "tensorboard ends with: No module named 'pkg_resources'"
        fix = pip("setuptools<82", "tensorboard")
        yield Finding(CHECK, "warning", f"tensorboard {board} beside setuptools {tools}", effect, fix)
    for name in ("torchvision", "torchaudio"):
        other = of(name)
        if torch and other and apart(build(torch), build(other), platform.machine()):
            text = f"{name} {other} beside torch {torch}: of another build"
            effect = f"import {name} fails: an operator does not exist, or a library is not found"
            fix = pip("--force-reinstall", "--no-deps", name, *index(build(torch)))
            yield Finding(CHECK, "warning", text, effect, fix)


def build(told: str) -> str:
    """Returns what a version says of its build; those on PyPI say nothing.

    >>> build("2.13.0+cpu"), build("0.28.0+cu130"), build("2.13.0")
    ('cpu', 'cu130', '')
    """
    return told.partition("+")[2]


def apart(one: str, other: str, machine: str) -> bool:
    """Whether two builds cannot work together: for the CPU and for CUDA, or for CUDA 12 and 13.

    >>> apart("cpu", "", "x86_64"), apart("cpu", "", "aarch64"), apart("", "cu130", "x86_64")
    (True, False, False)
    >>> apart("cu126", "cu130", "x86_64"), apart("cu128", "cu126", "x86_64")
    (True, False)
    """
    on_pypi = "cu" if machine == "x86_64" else "cpu"  # of which CUDA is not told
    one, other = (told[: len("cu12")] if told.startswith("cu") else told or on_pypi for told in (one, other))
    return one != other and ("cpu" in {one, other} or "cu" not in {one, other})


def index(of: str) -> list[str]:
    """Returns where pip finds a build; PyPI has the one without a word for it."""
    return ["--index-url", f"https://download.pytorch.org/whl/{of}"] if of else []


def numbers(told: str) -> tuple[int, ...]:
    """Returns the numbers of a release.

    >>> numbers("2.11.0a0+git1")
    (2, 11, 0)
    """
    found = re.match(r"\d+(\.\d+)*", told)
    return tuple(map(int, found[0].split("."))) if found else ()


def kernel(release: str) -> Iterator[Finding]:
    if (0,) < numbers(release)[:2] < OLDEST_LINUX:
        effect = "processes may hang, as accelerate warns"
        fix = as_root("apt-get install --only-upgrade linux-image-generic") + "  # or your distribution's; then reboot"
        yield Finding(CHECK, "note", f"Linux {release} is older than 5.5", effect, fix)


def _files() -> dict[str, set[str]]:
    """Returns the libraries of each of NVIDIA's packages."""
    names = {one.metadata["Name"] for one in distributions() if (one.metadata["Name"] or "").startswith("nvidia-")}
    return {name: {str(file) for file in distribution(name).files or () if ".so" in file.name} for name in names}


def overwritten(files: Mapping[str, set[str]]) -> Iterator[Finding]:
    """Yields packages that have written each other's files."""
    names = sorted(files)
    for place, first in enumerate(names):
        for second in names[place + 1 :]:
            if both := files[first] & files[second]:
                text = f"{first} and {second} both wrote {min(both)}"
                effect = "torch loads whichever was installed last: calls fail, or crash in native code"
                keep = second if re.search(rf"-cu{cuda_of_torch()[0] or 0}$", second) else first
                drop = first if keep == second else second
                fix = f"{python()} -m pip uninstall -y {drop} && {pip('--force-reinstall', '--no-deps', keep)}"
                yield Finding(CHECK, "warning", text, effect, fix)


def cuda_of_torch() -> tuple[int, ...]:
    """Returns the CUDA that torch was built for, (0,) for none; from its file, since importing torch takes long."""
    found = find_spec("torch")
    if found is None or found.origin is None:
        return (0,)
    try:
        text = Path(found.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return (0,)
    told = re.search(r"^cuda\b[^=]*= *'([\d.]+)'", text, re.MULTILINE)
    return numbers(told[1]) if told else (0,)


def with_driver(cuda: tuple[int, ...], driver: str, capabilities: Mapping[str, str]) -> Iterator[Finding]:
    """Yields what torch's CUDA, the driver and the GPUs make of each other.

    Args:
        cuda: that torch was built for: (13, 0).
        driver: its version: "550.54.15".
        capabilities: of each kind of GPU, its compute capability: "9.0".
    """
    told, oldest = ".".join(map(str, cuda)), DRIVERS.get(cuda[0])
    if oldest and (0,) < numbers(driver) < (oldest,):
        effect = "torch.cuda.is_available() is False, or: 'the NVIDIA driver on your system is too old'"
        fix = pip("--force-reinstall", "torch", *index(_for(driver)))
        text = f"torch for CUDA {told} wants driver {oldest} or newer, and this one is {driver}"
        yield Finding(CHECK, "error", text, effect, fix + "  # or a newer driver")
    for name, capability in capabilities.items():
        known = numbers(capability)
        too_old, too_new = cuda >= (13,) and known < TURING, cuda < FIRST_WITH_BLACKWELL and known >= BLACKWELL
        if cuda[0] and known and (too_old or too_new):
            text = f"torch for CUDA {told} has no kernels for {name} (compute capability {capability})"
            effect = "every call ends with: 'no kernel image is available for execution on the device'"
            fix = pip("--force-reinstall", "torch", *index("cu126" if too_old else "cu128"))
            yield Finding(CHECK, "error", text, effect, fix)


def _for(driver: str) -> str:
    """Returns the build that a driver can run."""
    return "cu126" if numbers(driver) >= (DRIVERS[12],) else "cpu"
