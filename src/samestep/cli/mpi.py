"""`samestep run --mpi`: mpiexec starts the ranks, each as a task of `samestep run`."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from samestep.errors import UsageError
from samestep.launch import mpiexec
from samestep.rankenv import set_variables, variable

__all__: list[str] = []

STARTED = ("PMI_RANK", "OMPI_COMM_WORLD_RANK")  # set by mpiexec


def under_mpiexec(options: argparse.Namespace, arguments: Sequence[str]) -> None:
    """Becomes an mpiexec of as many tasks; does not return."""
    if options.ranks is None or options.slurm or options.hosts or options.hostfile or options.nnodes:
        raise UsageError(
            "--mpi has the mpiexec of this machine start the ranks, so many as -n says: `samestep run --mpi -n 4 "
            "train.py`; on several hosts write the mpiexec yourself: `mpiexec --hostfile F -n 8 samestep run train.py`"
        )
    if options.restarts:
        raise UsageError(
            "MPI cannot begin twice under one mpiexec, so --restarts does not go with --mpi: leave it out, and call "
            "the command again; training resumes from its checkpoint"
        )
    if any(variable(name) is not None for name in STARTED):
        raise UsageError("an mpiexec has started this process already: leave out either it or --mpi")
    task = (sys.executable, "-P", "-m", "samestep", "run", *_without_mpi(arguments, len(options.program)))
    words = mpiexec.command(options.ranks, task)
    if options.dry_run:
        print(shlex.join(words))
        raise SystemExit(0)
    if find_spec("mpi4py") is None:
        raise UsageError("the ranks need mpi4py, which is not installed here: pip install 'samestep[mpi]' brings it")
    set_variables({"I_MPI_PIN": variable("I_MPI_PIN") or "off"})  # Intel's would bind each rank's threads to one core
    os.execv(words[0], words)  # noqa: S606


def _without_mpi(arguments: Sequence[str], behind: int) -> list[str]:
    """Returns the arguments without `--mpi` and the number of ranks, which mpiexec is told."""
    before, kept = iter(arguments[: len(arguments) - behind]), []
    for word in before:
        if word in {"-n", "--nproc-per-node", "--nproc_per_node"}:
            next(before, None)
        elif word not in {"--mpi", "--dry-run"} and not word.startswith(
            ("-n", "--nproc-per-node=", "--nproc_per_node=")
        ):
            kept.append(word)
    return [*kept, *arguments[len(arguments) - behind :]]
