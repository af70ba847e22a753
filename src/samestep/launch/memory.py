"""Whether the kernel has ended a process because memory ran out.

SIGKILL alone does not say who sent it. The kernel counts its own: for each control group in `memory.events` (version
2), for the whole machine in `/proc/vmstat`.
"""

from __future__ import annotations

from pathlib import Path

__all__: list[str] = []


def out_of_memory_kills(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Returns how many processes the kernel has killed for want of memory, where this process can see it."""
    return _count(proc / "vmstat") + _count(_group(proc, groups) / "memory.events")


def _group(proc: Path, groups: Path) -> Path:
    try:
        lines = (proc / "self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return groups
    return groups / next((line[3:].lstrip("/") for line in lines if line.startswith("0::")), "")


def _count(file: Path) -> int:
    try:
        words = [line.split() for line in file.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return 0
    return sum(int(pair[1]) for pair in words if pair[0] == "oom_kill")
