"""Variables of the environment that will surprise: each is right for somebody, and forgotten by somebody else."""

from __future__ import annotations

import re
import shlex
import socket
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from samestep.doctor.finding import Finding, Level, as_root, ok, samestep
from samestep.doctor.network import CHOSEN
from samestep.doctor.software import visible_gpus
from samestep.errors import RankVariablesError
from samestep.launch.cpus import read_cores
from samestep.rankenv import read_rank_variables, variable, variable_names

Read = Callable[[str], str | None]


class Risk(NamedTuple):
    """A variable, the values that surprise, and how."""

    name: str
    values: str
    level: Level
    effect: str


BOUND = "all ranks bind their threads to the same cores"
NUMPY_FIRST = "importing numpy before torch"
TEN_BITS = "float32 products keep 10 bits of the fraction"
SWITCHED = "(?i)1|true|yes|on"
RISKY_VARIABLES = (
    Risk("CUDA_LAUNCH_BLOCKING", SWITCHED, "warning", "kernels run one after another: steps take far longer"),
    Risk("PYTORCH_NO_CUDA_MEMORY_CACHING", ".+", "warning", "every tensor is a call of the driver: many times slower"),
    Risk("NCCL_P2P_DISABLE", SWITCHED, "warning", "GPUs of one host exchange through its memory: several times slower"),
    Risk("NCCL_IB_DISABLE", SWITCHED, "warning", "hosts exchange over TCP, though InfiniBand may be there"),
    Risk("NCCL_SHM_DISABLE", SWITCHED, "warning", "GPUs of one host may exchange over the network"),
    Risk("NCCL_DEBUG", "(?i)info|trace", "note", "every rank prints pages at its start"),
    Risk("TORCH_NCCL_BLOCKING_WAIT", SWITCHED, "note", "the host waits in every collective: less overlap"),
    Risk("NCCL_BLOCKING_WAIT", ".+", "note", "it is called TORCH_NCCL_BLOCKING_WAIT by now; this one is ignored"),
    Risk("NCCL_ASYNC_ERROR_HANDLING", ".+", "note", "it is called TORCH_NCCL_ASYNC_ERROR_HANDLING by now"),
    Risk("OMP_PROC_BIND", "(?i)true|close|spread|master", "warning", BOUND),
    Risk("GOMP_CPU_AFFINITY", ".+", "warning", BOUND),
    Risk("KMP_AFFINITY", "(?i).*(compact|scatter|explicit).*", "warning", BOUND),
    Risk("PYTHONDONTWRITEBYTECODE", ".+", "note", "every rank compiles all modules anew: a second at each start"),
    Risk("PYTHONOPTIMIZE", ".+", "note", "assert statements are not executed, yours included"),
    Risk("LD_PRELOAD", ".+", "note", "every rank loads it too; tools that replace functions can stop forked ranks"),
    Risk("OMP_WAIT_POLICY", "(?i)active", "warning", "threads that wait keep their cores: ranks slow each other down"),
    Risk("KMP_BLOCKTIME", "(?i)infinite|[1-9][0-9]{3,}", "warning", "threads that wait keep their cores for seconds"),
    Risk("MKL_THREADING_LAYER", "(?i)intel", "note", f"{NUMPY_FIRST} may end with 'incompatible with libgomp'"),
    Risk("NVIDIA_TF32_OVERRIDE", "1", "warning", f"{TEN_BITS}, even if torch.backends disables TF32"),
    Risk("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", SWITCHED, "note", TEN_BITS),
    Risk("TORCH_CPP_LOG_LEVEL", "(?i)info", "note", "every rank prints pages"),
    Risk("PYTHONMALLOC", ".*debug", "note", "every allocation of Python's is checked: slow"),
    Risk("PYTHONDEVMODE", ".+", "note", "every allocation of Python's is checked: slow"),
    Risk("GLOO_DEVICE_TRANSPORT", "(?i)(?!tcp$).+", "warning", "torch from PyPI has gloo's TCP alone: no group forms"),
    Risk("TORCH_DISTRIBUTED_DEBUG", "(?i)info", "note", "collectives are logged, and some checked: slower"),
)


PREFIXES = {  # of what is set and in no row above: what it changes without a word
    "NCCL_": "NCCL does what they say instead of what it would choose",
    "TORCH_NCCL_": "torch's NCCL groups do what they say",
    "GLOO_": "gloo does what they say instead of what it would choose",
    **dict.fromkeys(("OMP_", "KMP_", "MKL_"), "threads are placed and counted as they say, in every rank alike"),
}
ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LIBRARIES = ("libnccl.so*", "libcudart.so*", "libcudnn.so*", "libtorch.so*", "libgomp.so*", "libmpi.so*")
NCCL_FILES = (Path("/etc/nccl.conf"), Path("~/.nccl.conf"))


def check(read: Read = variable, names: Iterable[str] | None = None) -> Iterator[Finding]:
    found = [
        Finding(name, level, f"is {value}", effect, f"unset {name}")
        for name, values, level, effect in RISKY_VARIABLES
        if (value := read(name)) is not None and re.fullmatch(values, value.strip())
    ]
    others = [
        _detail(read, visible_gpus()),
        _threads(read("OMP_NUM_THREADS"), read_cores().amount),
        _gpus(read("CUDA_VISIBLE_DEVICES"), visible_gpus()),
        *_ranks(read),
    ]
    found += [line for line in others if line is not None]
    named = {line.check for line in found} | {risky.name for risky in RISKY_VARIABLES} | {*CHOSEN, "OMP_NUM_THREADS"}
    found += _prefixes(sorted(variable_names() if names is None else names), named, read)
    found += [*_libraries(read("LD_LIBRARY_PATH") or ""), *_files(NCCL_FILES)]
    yield from found or [ok("variables", "none that will surprise")]


def _detail(read: Read, gpus: int) -> Finding | None:
    """DETAIL compares all collectives through another group, which DistributedDataParallel's own does not survive."""
    if (read("TORCH_DISTRIBUTED_DEBUG") or "").strip().upper() != "DETAIL":
        return None
    check, fix = "TORCH_DISTRIBUTED_DEBUG", "unset TORCH_DISTRIBUTED_DEBUG"
    fix += f"  # {samestep()} verify compares collectives"
    if gpus:
        return Finding(check, "warning", "is DETAIL", "every collective is compared first: several times slower", fix)
    effect = "DistributedDataParallel on CPUs ends by a segmentation fault (torch 2.13)"
    return Finding(check, "error", "is DETAIL", effect, fix)


def _threads(text: str | None, cores: float) -> Finding | None:
    if text is None:
        return None
    check, fix = "OMP_NUM_THREADS", "unset OMP_NUM_THREADS"
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text.strip()):
        effect = "it is ignored, and every rank starts a thread for each core"
        return Finding(check, "warning", f"is {text!r}, no number", effect, fix)
    threads = int(text.split(",")[0])
    text = f"is {threads} on {cores:g} cores"
    if threads > cores:
        effect = "threads of one rank wait for each other's cores: several times slower"
        return Finding(check, "warning", text, effect, fix)
    effect = f"every rank computes with {threads}, however many ranks there are; unset, samestep run divides the cores"
    return Finding(check, "note", text, effect, fix)


def _gpus(text: str | None, visible: int) -> Finding | None:
    if text is None:
        return None
    check, fix = "CUDA_VISIBLE_DEVICES", "unset CUDA_VISIBLE_DEVICES"
    if not text.strip() or visible == 0:
        return Finding(check, "note", f"is {text!r}", "no GPU is seen: training is on the CPU", fix)
    if visible < len(text.split(",")):
        effect = "CUDA stops reading at the first entry that it does not know"
        return Finding(check, "warning", f"is {text}, of which {visible} can be seen", effect, fix)
    return Finding(check, "note", f"is {text}", f"{visible} GPUs are seen, others are not", fix)


def _ranks(read: Read) -> Iterator[Finding]:
    """What a launcher sets, and shells keep."""
    fix = f"unset {' '.join(ENVIRONMENT)}"
    try:
        launched = read_rank_variables()
    except RankVariablesError as error:
        yield Finding("rank variables", "error", str(error), "scripts that join by env:// fail at once", fix)
        return
    name = read("MASTER_ADDR")
    if launched is not None or name is None:
        return
    try:
        socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        effect = "scripts that join by env:// wait for a host that there is not, and fail"
        yield Finding("MASTER_ADDR", "warning", f"is {name}, which does not resolve: {error}", effect, fix)
    else:
        yield Finding("MASTER_ADDR", "note", f"is {name}", "scripts started by hand meet there", fix)


def _prefixes(names: Sequence[str], named: Collection[str], read: Read) -> Iterator[Finding]:
    """Whatever else is set for NCCL, gloo and OpenMP: a line for each of them."""
    for family, effect in PREFIXES.items():
        found = [name for name in names if name.startswith(family) and name not in named and read(name)]
        if found:
            text = ", ".join(f"{name}={read(name)}" for name in found)
            yield Finding(f"{family}*", "note", text, effect, f"unset {' '.join(found)}")


def _libraries(path: str) -> Iterator[Finding]:
    """Folders that are searched before torch's own, and hold a library that torch brings along."""
    for folder in filter(None, path.split(":")):
        found = sorted({file.name for pattern in LIBRARIES for file in Path(folder).glob(pattern)})
        if found:
            rest = ":".join(other for other in path.split(":") if other and other != folder)
            effect = "they may be loaded instead of those that torch was built with: calls fail, or crash"
            fix = f"export LD_LIBRARY_PATH={shlex.quote(rest)}"
            yield Finding("LD_LIBRARY_PATH", "note", f"{folder} holds {', '.join(found[:4])}", effect, fix)


def _files(files: Iterable[Path]) -> Iterator[Finding]:
    """NCCL reads variables from files as well."""
    for file in (each.expanduser() for each in files):
        if file.is_file():
            effect = "NCCL takes variables from it that no shell shows"
            fix = as_root(f"mv {shlex.quote(str(file))} {shlex.quote(str(file) + '.off')}")
            yield Finding("NCCL's file", "note", f"there is {file}", effect, fix)
