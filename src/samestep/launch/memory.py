"""Whether the kernel has ended a process because memory ran out.

SIGKILL alone does not say who sent it. The kernel counts its own: for each control group in `memory.events` (version
2) or `memory.oom_control` (version 1), whatever memory it was that ran out, and for the whole machine, everybody's
processes together, in `/proc/vmstat`. Where the group's own count can be seen, the machine's says nothing more.
"""

from __future__ import annotations

from pathlib import Path

from samestep.launch.cores import MACHINE, groups

__all__: list[str] = []

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


def _count(file: Path) -> int | None:
    try:
        words = [line.split() for line in file.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return None
    return next((int(pair[1]) for pair in words if pair[0] == "oom_kill"), None)
