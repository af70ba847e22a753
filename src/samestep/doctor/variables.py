"""Variables of the environment that will surprise: each is right for somebody, and forgotten by somebody else."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from samestep.doctor.line import Level, Line, fine
from samestep.errors import RankVariablesError
from samestep.launch.cores import read_cores
from samestep.launch.devices import visible_gpus
from samestep.rankenv import read_rank_variables, variable

__all__: list[str] = []

Read = Callable[[str], str | None]


class Trap(NamedTuple):
    """A variable, the values that surprise, and how."""

    name: str
    values: str
    level: Level
    effect: str


BOUND = "all ranks bind their threads to the same cores"
SWITCHED = "(?i)1|true|yes|on"
TRAPS = (
    Trap("CUDA_LAUNCH_BLOCKING", SWITCHED, "warning", "kernels run one after another: steps take far longer"),
    Trap("PYTORCH_NO_CUDA_MEMORY_CACHING", ".+", "warning", "every tensor is a call of the driver: many times slower"),
    Trap("NCCL_P2P_DISABLE", SWITCHED, "warning", "GPUs of one host exchange through its memory: several times slower"),
    Trap("NCCL_IB_DISABLE", SWITCHED, "warning", "hosts exchange over TCP, though InfiniBand may be there"),
    Trap("NCCL_SHM_DISABLE", SWITCHED, "warning", "GPUs of one host may exchange over the network"),
    Trap("NCCL_DEBUG", "(?i)info|trace", "note", "every rank prints pages at its start"),
    Trap("TORCH_NCCL_BLOCKING_WAIT", SWITCHED, "note", "the host waits in every collective: less overlap"),
    Trap("NCCL_BLOCKING_WAIT", ".+", "note", "it is called TORCH_NCCL_BLOCKING_WAIT by now; this one is ignored"),
    Trap("NCCL_ASYNC_ERROR_HANDLING", ".+", "note", "it is called TORCH_NCCL_ASYNC_ERROR_HANDLING by now"),
    Trap("OMP_PROC_BIND", "(?i)true|close|spread|master", "warning", BOUND),
    Trap("GOMP_CPU_AFFINITY", ".+", "warning", BOUND),
    Trap(
        "KMP_AFFINITY",
        "(?i).*(compact|scatter|explicit).*",
        "warning",
        BOUND,
    ),
    Trap("PYTHONDONTWRITEBYTECODE", ".+", "note", "every rank compiles all modules anew: a second at each start"),
    Trap("PYTHONOPTIMIZE", ".+", "note", "assert statements are not executed, yours included"),
    Trap("LD_PRELOAD", ".+", "note", "every rank loads it too; tools that replace functions can stop forked ranks"),
    Trap("TORCH_DISTRIBUTED_DEBUG", "(?i)info", "note", "collectives are logged, and some checked: slower"),
)


def look(read: Read = variable) -> Iterator[Line]:
    """Yields those that are set to something that surprises."""
    lines = [
        *(_sprung(trap, read) for trap in TRAPS),
        _detail(read, visible_gpus()),
        _threads(read("OMP_NUM_THREADS"), read_cores().amount),
        _gpus(read("CUDA_VISIBLE_DEVICES"), visible_gpus()),
        *_ranks(read),
    ]
    found = [line for line in lines if line is not None]
    yield from found or [fine("variables", "none that will surprise")]


def _sprung(trap: Trap, read: Read) -> Line | None:
    value = read(trap.name)
    if value is None or not re.fullmatch(trap.values, value.strip()):
        return None
    return Line(trap.name, trap.level, f"is {value}", trap.effect, f"unset {trap.name}")


def _detail(read: Read, gpus: int) -> Line | None:
    """DETAIL compares all collectives through another group, which DistributedDataParallel's own does not survive."""
    if (read("TORCH_DISTRIBUTED_DEBUG") or "").strip().upper() != "DETAIL":
        return None
    about, mend = "TORCH_DISTRIBUTED_DEBUG", "unset TORCH_DISTRIBUTED_DEBUG (samestep verify compares collectives)"
    if gpus:
        return Line(about, "warning", "is DETAIL", "every collective is compared first: several times slower", mend)
    effect = "DistributedDataParallel on CPUs ends by a segmentation fault (torch 2.13)"
    return Line(about, "error", "is DETAIL", effect, mend)


def _threads(text: str | None, cores: float) -> Line | None:
    if text is None:
        return None
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text.strip()):
        effect = "it is ignored, and every rank starts a thread for each core"
        return Line("OMP_NUM_THREADS", "warning", f"is {text!r}, no number", effect, "unset OMP_NUM_THREADS")
    threads = int(text.split(",")[0])
    if threads > cores:
        effect = "threads of one rank wait for each other's cores: several times slower"
        return Line("OMP_NUM_THREADS", "warning", f"is {threads} on {cores:g} cores", effect, "unset OMP_NUM_THREADS")
    effect = f"every rank computes with {threads}, however many ranks there are; unset, samestep run divides the cores"
    return Line("OMP_NUM_THREADS", "note", f"is {threads} on {cores:g} cores", effect, "unset OMP_NUM_THREADS")


def _gpus(text: str | None, visible: int) -> Line | None:
    if text is None:
        return None
    about, mend = "CUDA_VISIBLE_DEVICES", "unset CUDA_VISIBLE_DEVICES"
    if not text.strip() or visible == 0:
        return Line(about, "note", f"is {text!r}", "no GPU is seen: training is on the CPU", mend)
    if visible < len(text.split(",")):
        effect = "CUDA stops reading at the first entry that it does not know"
        return Line(about, "warning", f"is {text}, of which {visible} can be seen", effect, mend)
    return Line(about, "note", f"is {text}", f"{visible} GPUs are seen, others are not", mend)


def _ranks(read: Read) -> Iterator[Line]:
    """What a launcher sets, and shells keep."""
    mend = "unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT"
    try:
        told = read_rank_variables()
    except RankVariablesError as error:
        yield Line("rank variables", "error", str(error), "scripts that join by env:// fail at once", mend)
        return
    if told is None and read("MASTER_ADDR") is not None:
        yield Line("MASTER_ADDR", "note", f"is {read('MASTER_ADDR')}", "scripts started by hand meet there", mend)
