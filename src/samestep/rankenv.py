"""The place of this process among the ranks, read from what its launcher set; the sole owner of `os.environ`.

The first row of LAUNCHERS that is set wins: a launcher started under srun sets RANK itself, and means it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from samestep.errors import RankVariablesError


@dataclass(frozen=True, kw_only=True)
class RankVariables:
    """One process's place, as its launcher told it.

    `local_rank`, `local_size` and `host_index` are None where the launcher says nothing about hosts; `job` names
    the run in a way that all its ranks share and no other run does, or is None.
    """

    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    host_index: int | None
    source: str
    job: str | None
    one_host: bool | None
    master_addr: str | None = None
    master_port: int | None = None


@dataclass(frozen=True)
class _Launcher:
    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str
    host_index: str | None = None
    job: tuple[str, ...] = ()


LAUNCHERS = (
    _Launcher("env", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", ("TORCHELASTIC_RUN_ID",)),
    _Launcher(
        "slurm",
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_LOCALID",
        "SLURM_STEP_TASKS_PER_NODE",
        "SLURM_NODEID",
        ("SLURM_JOB_ID", "SLURM_STEP_ID"),
    ),
    _Launcher(
        "openmpi",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        None,
        ("PMIX_NAMESPACE",),
    ),
    _Launcher("pmi", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", None, ("PMI_JOBID",)),
)


def read_rank_variables(environ: Mapping[str, str] | None = None) -> RankVariables | None:
    """Returns this process's place among the ranks, or None where no launcher started it.

    `environ` are the variables to read; this process's own by default.

    Raises:
        RankVariablesError: some variables of a launcher are set and others missing, malformed or out of range.
    """
    variables = os.environ if environ is None else environ
    for launcher in LAUNCHERS:
        if _started_by(launcher, variables):
            return _read(launcher, variables)
    return None


def _started_by(launcher: _Launcher, variables: Mapping[str, str]) -> bool:
    if launcher.name == "slurm":  # a batch script has SLURM_PROCID, only srun's tasks have a step's size
        return launcher.size in variables
    if launcher.name == "env":
        return launcher.rank in variables or launcher.size in variables
    return launcher.rank in variables


def _read(launcher: _Launcher, variables: Mapping[str, str]) -> RankVariables:
    _require_both(launcher, variables)
    rank = _integer(variables, launcher.rank)
    size = _integer(variables, launcher.size)
    _check_range(launcher.rank, rank, launcher.size, size)
    local_rank = _integer(variables, launcher.local_rank) if launcher.local_rank in variables else None
    host_index = (
        _integer(variables, launcher.host_index) if launcher.host_index and launcher.host_index in variables else None
    )
    local_size = _local_size(launcher, variables, host_index)
    if local_rank is not None and local_size is not None:
        _check_range(launcher.local_rank, local_rank, launcher.local_size, local_size)
    port = _integer(variables, "MASTER_PORT") if "MASTER_PORT" in variables else None
    if port is not None and not 0 < port < 65536:
        raise RankVariablesError(f"MASTER_PORT is {port}: a port is a number from 1 to 65535")
    job = [variables[name] for name in launcher.job if name in variables]
    return RankVariables(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        host_index=host_index,
        source=launcher.name,
        job="-".join([launcher.name, *job]) if job else None,
        one_host=None if local_size is None else local_size == size,
        master_addr=variables.get("MASTER_ADDR"),
        master_port=port,
    )


def _require_both(launcher: _Launcher, variables: Mapping[str, str]) -> None:
    for present, missing in ((launcher.rank, launcher.size), (launcher.size, launcher.rank)):
        if present in variables and missing not in variables:
            raise RankVariablesError(
                f"{present} is set ({variables[present]!r}) but {missing} is not: set both, or neither, or start "
                "the script with `samestep run -n N`"
            )


def _integer(variables: Mapping[str, str], name: str) -> int:
    text = variables[name]
    if not re.fullmatch(r"\d+", text.strip()):
        raise RankVariablesError(f"{name} must be a whole number, 0 or more, and is {text!r}")
    return int(text)


def _check_range(rank_name: str, rank: int, size_name: str, size: int) -> None:
    if size < 1 or rank >= size:
        raise RankVariablesError(
            f"{rank_name} is {rank} but {size_name} is {size}: ranks count from 0, so {rank_name} must be below "
            f"{size_name}"
        )


def _local_size(launcher: _Launcher, variables: Mapping[str, str], host_index: int | None) -> int | None:
    if launcher.local_size not in variables:
        return None
    if launcher.name != "slurm":
        return _integer(variables, launcher.local_size)
    counts = expand_tasks_per_node(variables[launcher.local_size])
    return counts[host_index] if host_index is not None and host_index < len(counts) else None


def expand_tasks_per_node(text: str) -> list[int]:
    """Returns Slurm's tasks per node in full.

    >>> expand_tasks_per_node("2(x3),1")
    [2, 2, 2, 1]
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise RankVariablesError(f"SLURM_STEP_TASKS_PER_NODE is {text!r}; expected a form such as '2(x3),1'")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def variable(name: str, default: str | None = None) -> str | None:
    return os.environ.get(name, default)


def variable_names() -> list[str]:
    return sorted(os.environ)


def set_variables(values: Mapping[str, str | None]) -> None:
    """Sets environment variables of this process; None removes one."""
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def child_environment(extra: Mapping[str, str | None]) -> dict[str, str]:
    """Returns this process's environment with `extra` laid over it, for a child; None removes a variable."""
    merged: dict[str, str | None] = {**os.environ, **extra}
    return {name: value for name, value in merged.items() if value is not None}


def fresh_environment() -> dict[str, str]:
    """Returns this process's environment without what a launcher has said to it: for a child that starts ranks."""
    named = [(row.rank, row.size, row.local_rank, row.local_size, row.host_index) for row in LAUNCHERS]
    places = {name: None for row in named for name in row if name is not None}
    return child_environment({**places, "MASTER_ADDR": None, "MASTER_PORT": None})
