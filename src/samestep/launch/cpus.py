"""How many cores this job may use, and how they are assigned to the ranks of this host.

A core here is what the kernel numbers as a cpu. The smallest of three limits counts: the affinity (taskset, mpiexec, a
cpuset), Slurm's share, and the quota of the control group (docker --cpus), which torch alone never looks at.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from samestep.rankenv import expand_tasks_per_node, variable
from samestep.text import plural

MACHINE = Path("/")
_SLURM = "`srun --cpu-bind=none`, or `srun -c {wanted}`"
_MPI = "`mpiexec --bind-to none`, or `mpiexec --map-by slot:PE={wanted}`"
_FIXES = {  # by what started the ranks
    "openmpi": _MPI,
    "slurm": _SLURM,
    "pmi": "`mpiexec -bind-to none` (MPICH), or with I_MPI_PIN=off in the environment (Intel MPI)",
    "env": "more cores, or without taskset and numactl",
}


@dataclass(frozen=True, kw_only=True)
class Cores:
    """What this process may use of its machine.

    `usable` are the cpus of its affinity, `machine` how many are online. `quota` is the time that its control groups
    allow, in cores, and `slurm` how many Slurm gave to this task; both are None where there is no such limit.
    """

    usable: tuple[int, ...]
    machine: int
    quota: float | None = None
    slurm: int | None = None

    @property
    def count(self) -> int:
        """The smallest limit in whole cores, at least 1."""
        return max(1, int(self.amount))

    @property
    def amount(self) -> float:
        return self._smallest[1]

    @property
    def reason(self) -> str:
        """What limits them: "affinity", "Slurm", "cgroup quota", or "" where the whole machine is free."""
        return self._smallest[0]

    @property
    def limit(self) -> str:
        """How many there are and what limits them, in words."""
        if self.reason == "affinity":
            return f"affinity to {len(self.usable)} of {plural(self.machine, 'core')}"
        by = {"cgroup quota": " by the cgroup's quota", "Slurm": " by Slurm"}.get(self.reason, "")
        return plural(self.amount, "core") + by

    @property
    def _smallest(self) -> tuple[str, float]:
        limits = {"": self.machine, "affinity": len(self.usable), "Slurm": self.slurm, "cgroup quota": self.quota}
        known = [(name, float(limit)) for name, limit in limits.items() if limit is not None]
        return min(known, key=lambda limit: limit[1])  # of equals the first: a limit that takes nothing is no reason


def read_cores(root: Path = MACHINE, read: Callable[[str], str | None] = variable) -> Cores:
    """Returns what this process may use now; /proc, /sys and the control groups are below `root`."""
    usable = tuple(sorted(os.sched_getaffinity(0)))
    return Cores(usable=usable, machine=_online(root, len(usable)), quota=cpu_quota(root), slurm=slurm_share(read))


def unbound_cores(root: Path = MACHINE, read: Callable[[str], str | None] = variable) -> int:
    """Returns how many cores this job could use on this host if nothing bound its processes to single ones."""
    usable = _online(root, len(os.sched_getaffinity(0)))
    limits = [usable, cpuset_size(root), cpu_quota(root), _whole(read("SLURM_CPUS_ON_NODE"))]
    return max(1, int(min(limit for limit in limits if limit is not None)))


def _online(root: Path, otherwise: int) -> int:
    listed = read_if_there(root / "sys/devices/system/cpu/online")  # os.cpu_count() reads PYTHON_CPU_COUNT from 3.13 on
    return len(parse_cpu_list(listed)) if listed else otherwise


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Returns the cpus of a list as the kernel writes it: "0-2,8" is (0, 1, 2, 8)."""
    ends = [part.partition("-") for part in text.strip().split(",") if part]
    return tuple(cpu for low, _, high in ends for cpu in range(int(low), int(high or low) + 1))


# --- control groups -----------------------------------------------------------------------------

# cgroup-v2.rst, cgroup-v1/cpusets.rst and sched-bwc.rst of Linux; proc_pid_mountinfo(5)


class Mount(NamedTuple):
    """Where a hierarchy of control groups can be seen, from its group `top` downwards."""

    version: int
    top: str
    point: str


def cpu_quota(root: Path = MACHINE) -> float | None:
    """Returns the tightest quota of this process's group and all above it that can be seen, in cores."""
    quotas = [_quota(directory, version) for version, directory in groups(root, "cpu")]
    return min((quota for quota in quotas if quota is not None), default=None)


def cpuset_size(root: Path = MACHINE) -> int | None:
    """Returns how many cpus this process's control group has; None where no group says so."""
    for version, directory in groups(root, "cpuset"):
        listed = read_if_there(directory / ("cpuset.cpus.effective" if version == 2 else "cpuset.effective_cpus"))
        if listed and listed.strip():
            return len(parse_cpu_list(listed))
    return None


def _quota(directory: Path, version: int) -> float | None:
    if version == 2:
        quota, _, period = (read_if_there(directory / "cpu.max") or "max").strip().partition(" ")
    else:
        quota, period = (read_if_there(directory / f"cpu.cfs_{name}_us") or "" for name in ("quota", "period"))
    with suppress(ValueError, ZeroDivisionError):  # "max", no such file
        return int(quota) / int(period or 100_000) if int(quota) > 0 else None
    return None


def groups(root: Path, controller: str) -> Iterator[tuple[int, Path]]:
    """Yields version and directory of this process's control groups, each followed by those above it."""
    try:
        lines = [line.split(":", 2) for line in (read_if_there(root / "proc/self/cgroup") or "").split("\n") if line]
        own = {2 if not names else 1: group for _, names, group in lines if not names or controller in names.split(",")}
        mounts = parse_mounts(read_if_there(root / "proc/self/mountinfo") or "", controller)
    except ValueError:  # in no form that is known here, so no limit is
        return
    for version, group in own.items():
        seen = [mount for mount in mounts if mount.version == version]
        if seen:
            mount = max(seen, key=lambda mount: PurePosixPath(group).is_relative_to(mount.top))
            yield from ((version, root / path.lstrip("/")) for path in upwards(mount, group))


def parse_mounts(text: str, controller: str) -> list[Mount]:
    """Returns the mounted hierarchies that may have a controller, from /proc/self/mountinfo, in its order."""
    mounts = []
    for line in filter(None, text.split("\n")):
        left, _, right = line.partition(" - ")
        top, point = (unescape(field) for field in left.split(" ")[3:5])
        kind, _, options = right.split(" ")[:3]  # the source in between may be empty
        if kind == "cgroup2":
            mounts.append(Mount(2, top, point))
        elif kind == "cgroup" and controller in options.split(","):
            mounts.append(Mount(1, top, point))
    return mounts


def unescape(field: str) -> str:
    r"""Returns a path of mountinfo, in which spaces and the like are octal.

    >>> unescape(r"/my\040data")
    '/my data'
    """
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def upwards(mount: Mount, group: str) -> list[str]:
    """Returns the directory of a group and of all above it, to where its hierarchy is mounted.

    >>> upwards(Mount(2, "/docker/a1", "/sys/fs/cgroup"), "/docker/a1/job")
    ['/sys/fs/cgroup/job', '/sys/fs/cgroup']
    """
    path = PurePosixPath(group)
    inside = path.relative_to(mount.top) if path.is_relative_to(mount.top) else PurePosixPath()
    if ".." in inside.parts:  # the group lies outside this namespace, which does not tell its name
        inside = PurePosixPath()
    return [str(mount.point / above) for above in (inside, *inside.parents)]


def read_if_there(path: Path) -> str | None:
    """Returns a file's content; None where this machine has no such file, or hides it."""
    try:
        return path.read_bytes().decode("utf-8", "surrogateescape")  # others' mounts have names of any bytes
    except OSError:
        return None


# --- Slurm and threads ----------------------------------------------------------------------------


def slurm_share(read: Callable[[str], str | None] = variable) -> int | None:
    """Returns how many cores Slurm gave to this task, or to a batch script's job on this host; None outside of both.

    SLURM_CPUS_PER_TASK counts in a step only: a batch script carries it too, and is no task. salloc's shell runs on
    another host than the job; it has no SLURM_CPUS_ON_NODE.
    """
    on_node = _whole(read("SLURM_CPUS_ON_NODE"))
    if on_node is None or read("SLURM_STEP_NUM_TASKS") is None:
        return on_node
    each = _whole(read("SLURM_CPUS_PER_TASK"))
    if each is not None:
        return min(each, on_node)
    counts = expand_tasks_per_node(read("SLURM_STEP_TASKS_PER_NODE") or "1")
    return max(1, on_node // counts[min(int(read("SLURM_NODEID") or 0), len(counts) - 1)])


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and re.fullmatch(r"0*[1-9]\d*", text) else None


def threads(cores: Cores, local_ranks: int) -> int:
    """Returns how many threads each rank gets, at least 1, so that no two want the same core if there are enough."""
    together = int(min(len(cores.usable), cores.quota or math.inf))
    return max(1, min(together, cores.slurm or together) // local_ranks)


# --- pinning --------------------------------------------------------------------------------------


class CpuLocation(NamedTuple):
    """Where a cpu is. Those that agree in all three are hardware threads of one core."""

    node: int
    package: int
    core: int


def pin(cores: Cores, local_ranks: int, local_rank: int) -> tuple[int, ...]:
    """Returns the cpus that one rank is to be bound to; a quota or Slurm's word does not say which, so all are used."""
    return assign_cpus(read_locations(cores.usable), local_ranks)[local_rank]


def read_locations(cpus: Iterable[int], root: Path = MACHINE) -> dict[int, CpuLocation]:
    """Returns where each cpu is; one of which the kernel does not say it is a core of its own."""
    return {cpu: _location(cpu, root / f"sys/devices/system/cpu/cpu{cpu}") for cpu in cpus}


def _location(cpu: int, folder: Path) -> CpuLocation:
    node = min((int(path.name[4:]) for path in folder.glob("node[0-9]*")), default=0)
    package, core = (
        int(read_if_there(folder / "topology" / name) or -1) for name in ("physical_package_id", "core_id")
    )  # both are -1 where the firmware is silent
    return CpuLocation(node, package, core) if core >= 0 else CpuLocation(node, -1, cpu)


def assign_cpus(places: Mapping[int, CpuLocation], ranks: int) -> list[tuple[int, ...]]:
    """Returns the cpus of every rank: neighbours, no cpu twice, none left over.

    With more ranks than cores, ranks share a core's hardware threads; with more than cpus, they take turns.

    >>> assign_cpus({cpu: CpuLocation(0, 0, cpu % 4) for cpu in range(8)}, 2)
    [(0, 4, 1, 5), (2, 6, 3, 7)]
    """
    cpus = sorted(places, key=lambda cpu: (places[cpu], cpu))
    if ranks > len(cpus):
        return [(cpus[rank % len(cpus)],) for rank in range(ranks)]
    cores: dict[CpuLocation, list[int]] = {}
    for cpu in cpus:
        cores.setdefault(places[cpu], []).append(cpu)
    units = list(cores.values()) if ranks <= len(cores) else [[cpu] for cpu in cpus]
    ends = [len(units) * rank // ranks for rank in range(ranks + 1)]
    return [tuple(cpu for unit in units[low:high] for cpu in unit) for low, high in pairwise(ends)]


# --- in words -------------------------------------------------------------------------------------


def describe(cores: Cores, local_ranks: int, threads: int, pinned: bool = False, *, chosen: str | None = None) -> str:
    """Returns the line that says how cores are shared, for example "2 ranks on 2 cores, 1 thread each".

    `chosen` is OMP_NUM_THREADS where the user has set it himself: it wins over `threads`.
    """
    each = plural(threads, "thread") + (" each" if local_ranks > 1 else "")
    if chosen is not None:
        each = f"OMP_NUM_THREADS={chosen} as you set it"
        threads = _whole(chosen.partition(",")[0].strip()) or threads  # "4,2" is four, and two within each
    ranks, tail = plural(local_ranks, "rank"), ", pinned" if pinned else ""
    over = local_ranks * threads > cores.count
    why = ", ".join(filter(None, [cores.reason, "oversubscribed" if over else ""]))
    share = f"{round(cores.amount, 2):g} of " if cores.reason else ""
    where = share + plural(cores.machine, "core") + (f" ({why})" if why else "")
    if over:
        return f"{ranks} on {where}: {each}{tail}"
    if cores.reason:
        return f"{ranks}, {each}{'' if chosen is None else ','} on {where}{tail}"
    return f"{ranks} on {where}, {each}{tail}"


def binding_warning(affinities: Sequence[Collection[int]], machine: int, launcher: str | None = None) -> str | None:
    """Returns one sentence where the launcher has bound ranks to too few cores, with what fixes it; else None.

    Open MPI binds each of up to two ranks to one core unless told otherwise: all threads of torch then share it.

    `machine` is how many cores the ranks could use here if nothing bound them: `unbound_cores()`.
    """
    ranks = len(affinities)
    wanted = max(1, machine // max(1, ranks))
    who = f"each of the {ranks} ranks of this host is" if ranks > 1 else "the only rank of this host is"
    bound = "a single core"
    if ranks > 1 and len(set().union(*affinities)) == 1 and machine > 1:
        who, bound = f"all {ranks} ranks of this host are", f"core {min(affinities[0])}"
    elif wanted == 1 or not ranks or any(len(cpus) > 1 for cpus in affinities):
        return None
    meant = f" and {wanted} threads are meant for each" if wanted > 1 else ""
    fix = _FIXES.get(launcher or "", f"{_MPI}; with {_SLURM}").format(wanted=wanted)
    return f"{who} bound to {bound}, though {machine} cores are there{meant}: start them with {fix}"
