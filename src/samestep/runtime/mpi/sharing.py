"""Whether the ranks of a group should wait inside MPI, by the cores that they have; and whether those are too few.

A rank that waits inside MPI keeps a core busy. That is right where it has one to spare: where mpiexec or Slurm has
bound the ranks of this host to cores of their own, more than torch has threads.

    mpiexec --map-by slot:PE=4, OMP_NUM_THREADS=3     rank 0: 0-3, rank 1: 4-7       blocking
    mpiexec --map-by slot:PE=4, OMP_NUM_THREADS=4     rank 0: 0-3, rank 1: 4-7       polling: torch uses them all
    mpiexec --bind-to none                            rank 0: 0-7, rank 1: 0-7       polling: others may use them
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from samestep.errors import UsageError
from samestep.launch.cores import binding_warning, unbound_cores
from samestep.launch.warning import warn
from samestep.rankenv import variable
from samestep.runtime.mpi.library import told

__all__: list[str] = []

WAYS = ("blocking", "polling")


def is_better_blocking(mpi: Any, communicator: Any, options: Mapping[str, str] | None) -> bool:
    """Returns whether the ranks of a communicator should wait inside MPI; the same on all. Collective.

    Raises:
        UsageError: an option is unknown.
    """
    given = {} if options is None else dict(options)
    way = given.pop("waiting", None)
    if given or way not in {None, *WAYS}:
        raise UsageError(f"the backend mpi has one option, 'waiting', which is {' or '.join(map(repr, WAYS))}")
    own = way == "blocking"
    if way is None:
        own = has_core_to_spare(affinities(mpi, communicator), torch.get_num_threads())
    return bool(communicator.allreduce(own, mpi.LAND))


def has_core_to_spare(cpus: Sequence[Sequence[int]], threads: int) -> bool:
    """Whether each of the ranks of a host has cores of its own, and more than threads.

    Args:
        cpus: that each may use.
        threads: that each computes with.

    >>> has_core_to_spare([[0, 1], [2, 3]], 1), has_core_to_spare([[0, 1], [0, 1]], 1)
    (True, False)
    """
    return all(len(each) > threads for each in cpus) and len(set().union(*cpus)) == sum(map(len, cpus))


def affinities(mpi: Any, communicator: Any) -> list[list[int]]:
    """Returns the cpus of every rank of this host. Collective."""
    here = communicator.Split_type(mpi.COMM_TYPE_SHARED)
    found: list[list[int]] = here.allgather(sorted(os.sched_getaffinity(0)))
    here.Free()
    return found


def warn_of_binding(mpi: Any) -> None:
    """Warns, on one rank of each host, where mpiexec has bound the ranks to too few cores. Collective.

    Under `samestep run` the launcher says it, before it starts anything.
    """
    found = affinities(mpi, mpi.COMM_WORLD)
    place = told()
    if variable("SAMESTEP_LOGS") is not None or place is None or place.local_rank:
        return
    said = binding_warning(found, unbound_cores(), launcher=place.source)
    if said is not None:
        warn(said)
