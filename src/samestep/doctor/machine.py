"""What the machine gives to a training: cores, memory, shared memory, limits."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

from samestep.doctor.line import Line, fine
from samestep.launch.cores import MACHINE, Cores, read_cores
from samestep.launch.memory import read_memory
from samestep.reporting.words import size

__all__: list[str] = []

SHM = Path("/dev/shm")  # noqa: S108  (the kernel's, not a file of ours)
LEAST_SHM = 1 << 30  # bytes: two ranks' gradients of a model of 100 million parameters, and some batches
LEAST_FILES = 4096  # ranks, workers and their pipes; 1,024 is what most distributions give
LEAST_MEMORY = 1 << 30  # bytes


def look(root: Path = MACHINE) -> Iterator[Line]:
    """Yields a line for each."""
    cores = read_cores(root)
    yield _cores(cores)
    yield from _numa(root, len(cores.usable))
    yield _memory(*read_memory(root))
    yield shared_memory(SHM)
    yield open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield from _locked(root)


def _cores(cores: Cores) -> Line:
    busy = f", load {os.getloadavg()[0]:.1f}"
    if cores.reason == "affinity" and len(cores.usable) == 1 < cores.machine:
        effect = "all ranks share one core"
        mend = "taskset -p ffffffff $$; srun --cpu-bind=none; mpiexec --bind-to none"
        return Line("cores", "warning", cores.limit + busy, effect, mend)
    if cores.amount < 1:
        effect = "every step is stopped for a part of each tenth of a second"
        return Line("cores", "warning", cores.limit, effect, "raise docker --cpus or the pod's cpu limit")
    if cores.machine > 1 and os.getloadavg()[0] > 1.5 * cores.amount:
        effect = "ranks wait for cores, and for each other"
        return Line("cores", "warning", cores.limit + busy, effect, "see who computes: top")
    return fine("cores", cores.limit + busy)


def _numa(root: Path, cpus: int) -> Iterator[Line]:
    nodes = len(list((root / "sys/devices/system/node").glob("node[0-9]*")))
    if nodes > 1:
        text = f"{nodes} nodes for {cpus} cores: `samestep run --pin` keeps each rank's memory beside its cores"
        yield fine("NUMA", text)


def _memory(left: int, whole: int) -> Line:
    text = f"{size(left)} free of {size(whole)}"
    if left < LEAST_MEMORY:
        effect = "the kernel ends ranks without a word (exit code 137)"
        return Line("memory", "warning", text, effect, "see who holds it: ps aux --sort=-rss | head")
    return fine("memory", text)


def shared_memory(folder: Path) -> Line:
    """Judges the folder in which DataLoader workers and ranks of one host share memory."""
    about, effect = str(folder), "DataLoader workers end with a bus error; gradients of ranks on CPUs go over gloo"
    mend = f"mount -o remount,size=8G {folder}; docker run --shm-size=8g, or --ipc=host"
    try:
        room = os.statvfs(folder)
    except OSError as error:
        return Line(about, "warning", f"cannot be used: {error.strerror}", effect, f"mount -t tmpfs shm {folder}")
    free, whole = room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize
    text = f"{size(free)} free of {size(whole)}"
    if not os.access(folder, os.W_OK | os.X_OK):
        return Line(about, "warning", f"{text}, and not writable", effect, f"chmod 1777 {folder}")
    return Line(about, "warning", text, effect, mend) if free < LEAST_SHM else fine(about, text)


def open_files(soft: int) -> Line:
    """Judges how many files a process may have open."""
    told = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft:,}"
    if soft != resource.RLIM_INFINITY and soft < LEAST_FILES:
        effect = "ranks with DataLoader workers end with 'Too many open files'"
        return Line("open files", "note", f"{told} a process", effect, "ulimit -n 65536")
    return fine("open files", f"{told} a process")


def _locked(root: Path) -> Iterator[Line]:
    """RDMA pins memory: only where there is an adapter does the limit matter."""
    adapters = root / "sys/class/infiniband"
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if adapters.is_dir() and any(adapters.iterdir()) and soft != resource.RLIM_INFINITY:
        effect = "InfiniBand cannot register memory: NCCL and MPI fail, or fall back to TCP"
        yield Line("locked memory", "warning", size(soft), effect, "ulimit -l unlimited (limits.conf: memlock)")
