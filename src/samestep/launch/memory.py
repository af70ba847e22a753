"""How much memory there is, and whether the kernel has ended a process because it ran out.

SIGKILL alone does not say who sent it. The kernel counts its own: for each control group in `memory.events` (version
2) or `memory.oom_control` (version 1), whatever memory it was that ran out, and for the whole machine, everybody's
processes together, in `/proc/vmstat`. Where the group's own count can be seen, the machine's says nothing more.
"""

from __future__ import annotations

from pathlib import Path

from samestep.errors import UsageError
from samestep.launch.cores import MACHINE, groups

__all__: list[str] = []

KERNEL_KILLED = "the kernel killed"  # in what is said of a rank that has ended for want of memory, and nowhere else
OF_A_RANK = 28 << 20  # bytes that a forked rank of the smallest model has for itself, torch 2.13: the least there is
COUNTERS = {1: "memory.oom_control", 2: "memory.events"}  # by version of the hierarchy


def out_of_memory_kills(root: Path = MACHINE) -> int:
    """Returns how many processes the kernel has killed for want of memory: of this group, else of this machine."""
    own = _own_kills(root)
    return _count(root / "proc/vmstat") or 0 if own is None else own


def counts_own_kills(root: Path = MACHINE) -> bool:
    """Tells whether :func:`out_of_memory_kills` counts the processes of this control group alone."""
    return _own_kills(root) is not None


def _own_kills(root: Path) -> int | None:
    """Returns the count of this process's own groups, none of those above them; None where no group has one."""
    found: dict[int, int | None] = {}
    for version, directory in groups(root, "memory"):
        if version not in found:
            found[version] = _count(directory / COUNTERS[version])
    counts = [count for count in found.values() if count is not None]
    return sum(counts) if counts else None


def _count(file: Path, name: str = "oom_kill") -> int | None:
    try:
        words = [line.split() for line in file.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return None
    return next((int(pair[1]) for pair in words if pair[0] == name), None)


def check_room(ranks: int, root: Path = MACHINE) -> None:
    """Refuses more ranks than this host could hold, whatever they do: it would stand still, and then kill.

    Raises:
        UsageError: there are too many.
    """
    left, _ = read_memory(root)
    if ranks * OF_A_RANK > left:
        needed, free = (f"{size / 1e9:.1f} GB" for size in (ranks * OF_A_RANK, left))
        most = max(1, left // OF_A_RANK)
        raise UsageError(
            f"-n {ranks} needs {needed} of memory or more, and {free} are free: give at most -n {most}, and usually "
            "one process for each GPU, or each core"
        )


def read_memory(root: Path = MACHINE) -> tuple[int, int]:
    """Returns the bytes that can still be had here, and those that there are, within the control group's limit.

    The files that the kernel keeps in what is left can be had too.
    """
    lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
    known = {name: int(rest.split()[0]) << 10 for name, _, rest in (line.partition(":") for line in lines)}
    whole, left = known["MemTotal"], known.get("MemAvailable", known["MemFree"])
    for version, folder in groups(root, "memory"):
        names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        limit, used = (_number(folder / name) for name in names)
        if limit is not None and limit < whole:
            whole, left = limit, min(left, limit - max(0, (used or 0) - _cached(folder, version)))
    return max(0, left), whole


def _cached(folder: Path, version: int) -> int:
    """Returns the bytes of files that the kernel keeps for a group, and gives up before it refuses anybody memory.

    They count as the group's own use, and fill it up to its limit once enough has been read.
    """
    prefix = "" if version == 2 else "total_"  # with those of the groups below, as the use itself
    return sum(_count(folder / "memory.stat", f"{prefix}{kind}_file") or 0 for kind in ("active", "inactive"))


def _number(file: Path) -> int | None:
    try:
        text = file.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
