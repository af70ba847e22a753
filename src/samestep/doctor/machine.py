"""What the machine gives to a training: cores, memory, shared memory, limits; the disk that runs are written to."""

from __future__ import annotations

import math
import os
import re
import resource
import shlex
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from filelock import FileLock, Timeout

from samestep.doctor.finding import Finding, Level, as_root, ok, raised
from samestep.launch.cpus import MACHINE, Cores, groups, read_cores
from samestep.launch.resources import busy_cores, read_memory
from samestep.text import format_bytes, format_duration

SHM = Path("/dev/shm")  # noqa: S108  (the kernel's, not a file of ours)
LEAST_SHM = 1 << 30  # bytes: two ranks' gradients of a model of 100 million parameters, and some batches
LEAST_FILES = 4096  # ranks, workers and their pipes; 1,024 is what most distributions give
WANTED_FILES = 65536
FEWEST_FILES = 1024  # with fewer, a few ranks are enough
FEWEST_PROCESSES = 512  # threads count: every rank has some tens
LEAST_MEMORY = 1 << 30  # bytes
LARGEST_FILE = 1 << 40  # bytes
BUSY = 0.5  # of the cores
UNLIMITED = resource.RLIM_INFINITY
WRITTEN = 32 << 20  # bytes that are written to measure the disk
SYNCS = 5
SLOW_DISK = 50e6  # bytes a second
LONG_SYNC = 0.2  # seconds for a small write to be safe
LEAST_DISK = 1 << 30  # bytes


def check(root: Path = MACHINE, busy: float = 0.0) -> Iterator[Finding]:
    """Yields a line for each; `busy` is how many of the cores others kept busy before the doctor began."""
    yield judge_cores(read_cores(root), busy)
    yield numa(root)
    yield _memory(*read_memory(root))
    yield shared_memory(SHM)
    yield open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))
    yield processes(root, *resource.getrlimit(resource.RLIMIT_NPROC))
    yield from largest_file(*resource.getrlimit(resource.RLIMIT_FSIZE))
    yield from _locked(root)


def busy_before() -> float:
    """Returns how many of the cores that this process may use are busy: to be asked before the doctor keeps them so."""
    return busy_cores(read_cores().usable)


def judge_cores(cores: Cores, busy: float) -> Finding:
    text = f"{cores.limit}, {busy:.1f} of them busy"
    if cores.reason == "affinity" and len(cores.usable) == 1 < cores.machine:
        effect = "all ranks share one core"
        fix = f"taskset -cp 0-{cores.machine - 1} $$  # this shell; or srun --cpu-bind=none, mpiexec --bind-to none"
        return Finding("cores", "warning", text, effect, fix)
    if cores.amount < 1:
        effect = "every step is stopped for a part of each tenth of a second"
        fix = f"docker update --cpus={min(2, cores.machine)} {socket.gethostname()}"
        fix += "  # on the machine that holds this container; of a pod: resources.limits.cpu"
        return Finding("cores", "warning", text, effect, fix)
    if busy > BUSY * len(cores.usable):
        effect = "ranks wait for cores, and for each other"
        return Finding("cores", "warning", text, effect, "top -o %CPU  # who computes")
    return ok("cores", text)


def numa(root: Path) -> Finding:
    """Tells how many parts of memory there are, each near to some of the cores."""
    nodes = len(list((root / "sys/devices/system/node").glob("node[0-9]*")))
    many = f"{nodes} nodes: `samestep run --pin` keeps each rank's memory beside its cores"
    return ok("NUMA", many if nodes > 1 else "1 node: all memory is as near to every core")


def _memory(left: int, whole: int) -> Finding:
    text = f"{format_bytes(left)} free of {format_bytes(whole)}"
    if left < LEAST_MEMORY:
        effect = "the kernel ends ranks without a word (exit code 137)"
        return Finding("memory", "warning", text, effect, "ps aux --sort=-rss | head  # who holds it")
    return ok("memory", text)


def shared_memory(folder: Path) -> Finding:
    """Judges the folder in which DataLoader workers and ranks of one host share memory."""
    check, effect = str(folder), "DataLoader workers and MPI's ranks crash; gradients of ranks on CPUs go over gloo"
    fix = as_root(f"mount -o remount,size=8G {folder}") + "  # or start the container by docker run --shm-size=8g"
    try:
        room = os.statvfs(folder)
    except OSError as error:
        fix = as_root(f"mount -t tmpfs shm {folder}")
        return Finding(check, "warning", f"cannot be used: {error.strerror}", effect, fix)
    free, whole = room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize
    text = f"{format_bytes(free)} free of {format_bytes(whole)}"
    if not os.access(folder, os.W_OK | os.X_OK):
        return Finding(check, "warning", f"{text}, and not writable", effect, as_root(f"chmod 1777 {folder}"))
    return Finding(check, "warning", text, effect, fix) if free < LEAST_SHM else ok(check, text)


def open_files(soft: int, hard: int) -> Finding:
    text = "unlimited a process" if soft == UNLIMITED else f"{soft:,} a process"
    if soft != UNLIMITED and soft < LEAST_FILES:
        effect = "ranks with DataLoader workers end with 'Too many open files'"
        wanted = hard if LEAST_FILES <= hard < WANTED_FILES else WANTED_FILES
        level: Level = "warning" if soft < FEWEST_FILES else "note"
        return Finding("open files", level, text, effect, raised("n", "nofile", wanted, hard))
    return ok("open files", text)


def processes(root: Path, soft: int, hard: int) -> Finding:
    """Judges how many processes and threads there may be: the user's limit, which binds root not, and the group's."""
    own = math.inf if soft == UNLIMITED or os.geteuid() == 0 else soft
    group, held, folder = _group_processes(root)
    if group - held < min(own, FEWEST_PROCESSES):
        fix = as_root(f"sh -c 'echo max > {folder / 'pids.max'}'") + "  # or docker run --pids-limit=-1"
        text = f"{group - held:,.0f} more in this control group, of {group:,.0f}"
    elif own < FEWEST_PROCESSES:
        text, fix = f"{own:,.0f} of this user", raised("u", "nproc", 65536, hard)
    else:
        return ok("processes", "unlimited" if min(own, group) == math.inf else f"{min(own, group):,.0f} with threads")
    return Finding("processes", "warning", text, "ranks, workers and threads end with 'cannot allocate'", fix)


def _group_processes(root: Path) -> tuple[float, float, Path]:
    """Returns the tightest limit of the control groups, how many there are in that one, and where it is set."""
    found = [(math.inf, 0.0, Path())]
    for _, folder in groups(root, "pids"):
        try:
            limit, held = ((folder / f"pids.{name}").read_text(encoding="ascii").strip() for name in ("max", "current"))
        except OSError:
            continue
        if limit != "max":
            found.append((float(limit), float(held), folder))
    return min(found, key=lambda one: one[0] - one[1])


def largest_file(soft: int, hard: int) -> Iterator[Finding]:
    """Yields how large a file may grow, where there is a limit that checkpoints can reach."""
    if soft != UNLIMITED and soft < LARGEST_FILE:
        effect = "checkpoints and logs that are larger fail: 'File too large'"
        whole = as_root("prlimit --pid $$ --fsize=unlimited:unlimited") + "  # this shell; docker run --ulimit fsize=-1"
        fix = "ulimit -f unlimited" if hard == UNLIMITED else whole
        yield Finding("file size", "warning", f"at most {format_bytes(soft)}", effect, fix)


def _locked(root: Path) -> Iterator[Finding]:
    """RDMA pins memory: only where there is an adapter does the limit matter."""
    adapters = root / "sys/class/infiniband"
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if adapters.is_dir() and any(adapters.iterdir()) and soft != resource.RLIM_INFINITY:
        effect = "InfiniBand cannot register memory: NCCL and MPI fail, or fall back to TCP"
        fix = as_root("prlimit --pid $$ --memlock=unlimited:unlimited")
        fix += "  # this shell; docker run --ulimit memlock=-1"
        yield Finding("locked memory", "warning", format_bytes(soft), effect, fix)


# --- the disk ---------------------------------------------------------------------------------


def check_disk(folder: Path) -> Iterator[Finding]:
    try:
        with tempfile.TemporaryDirectory(prefix=".samestep-doctor-", dir=folder) as name:
            yield _disk_room(folder)
            yield _disk_speed(Path(name))
            yield locks(Path(name))
    except OSError as error:
        fix = "mkdir -p ~/runs && cd ~/runs  # or name a folder by --run-dir"
        text = f"{folder} cannot be written: {error.strerror}"
        yield Finding("disk", "error", text, "a run cannot keep its logs and checkpoints", fix)


def _disk_room(folder: Path) -> Finding:
    room = os.statvfs(folder)
    free = room.f_bavail * room.f_frsize
    text = f"{format_bytes(free)} free in {folder} ({kind_of(folder)})"
    if free < LEAST_DISK:
        effect = "checkpoints are refused for want of room"
        fix = f"du -xh --max-depth=2 {shlex.quote(str(folder))} | sort -h | tail"
        return Finding("disk", "warning", text, effect, fix)
    return ok("disk", text)


def kind_of(folder: Path) -> str:
    """Returns the file system's kind: "ext4", "nfs4"; "?" where the kernel does not tell."""
    device = folder.stat().st_dev
    named = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        found = re.fullmatch(r"\d+ \d+ (\S+) .* - (\S+) .*", line)
        if found and found[1] == named:
            return found[2]
    return "?"


def _disk_speed(folder: Path) -> Finding:
    block = os.urandom(1 << 20)
    rate = WRITTEN / _written(folder / "large", [block] * (WRITTEN >> 20))
    safe = median(_written(folder / str(number), [b"samestep"]) for number in range(SYNCS))
    text = f"{format_bytes(rate)}/s written and safe; a small write safe after {format_duration(safe)}"
    if rate < SLOW_DISK or safe > LONG_SYNC:
        effect = "checkpoints take long; they are written beside the training, but a preempted run must wait"
        return Finding("disk speed", "warning", text, effect, "df -hT  # give checkpoints a folder on a local disk")
    return ok("disk speed", text)


def _written(path: Path, blocks: list[bytes]) -> float:
    """Writes blocks; returns the seconds until they are safe."""
    begun = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for block in blocks:
            file.write(block)
        os.fsync(file.fileno())
    return time.perf_counter() - begun


def locks(folder: Path) -> Finding:
    name = str(folder / "lock")
    try:
        with FileLock(name, timeout=5):
            try:
                with FileLock(name, timeout=0):
                    pass
            except Timeout:
                return ok("file locks", "hold")
    except (OSError, NotImplementedError, Timeout) as error:
        text = f"do not work here: {error}"
    else:
        text = "are not exclusive"
    effect = "samestep.once may download twice, and two runs may write one checkpoint"
    fix = "findmnt -T . -o TARGET,FSTYPE,OPTIONS  # NFS: mount it without nolock; or use a local folder"
    return Finding("file locks", "warning", text, effect, fix)
