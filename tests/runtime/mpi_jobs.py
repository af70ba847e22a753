"""Starting jobs under the mpiexecs of this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

MPIEXEC = Path(sys.executable).with_name("mpiexec")
DEBIANS = shutil.which("mpiexec.openmpi")
LAUNCHERS = {
    "mpich": [str(MPIEXEC)],
    "openmpi": [DEBIANS, "--oversubscribe", "--bind-to", "none"],
    "bound": [DEBIANS, "--bind-to", "core"],
}
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
FOREIGN = ("PMI", "MPI", "OMPI", "GLOO", "OMP", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SAMESTEP_")


def mpiexec(library, count, *words, folder=None, timeout=120, **extra):
    """Runs words as a job of so many processes, or skips where the library is missing."""
    if find_spec("mpi4py") is None:
        pytest.skip("needs mpi4py: pip install 'samestep[mpi]'")
    if library != "mpich" and DEBIANS is None:
        pytest.skip("no Open MPI here: apt-get install openmpi-bin")
    if library == "mpich" and not MPIEXEC.exists():
        pytest.skip("no mpiexec beside this Python: pip install mpich brings one")
    own = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    given = {name: value for name, value in {**own, **AS_ROOT, "OMP_NUM_THREADS": "1", **extra}.items() if value}
    return subprocess.run(
        [*map(str, LAUNCHERS[library]), "-n", str(count), *map(str, words)],
        cwd=folder,
        env=given,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
