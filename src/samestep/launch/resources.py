"""What this machine has and how busy it is: GPUs, memory, processes that the kernel killed, cores in use."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Collection
from pathlib import Path

from samestep.errors import UsageError
from samestep.launch.cpus import MACHINE, groups, read_if_there
from samestep.rankenv import variable

DRIVER = Path("/proc/driver/nvidia/gpus")
KERNEL_KILLED = "the kernel killed"  # only in the message of a rank that ended because memory ran out
BYTES_OF_A_RANK = 28 << 20  # that a forked rank of the smallest model has for itself, torch 2.13: the least there is
BUSY_WINDOW_S = 0.2
_COUNTERS = {1: "memory.oom_control", 2: "memory.events"}  # by version of the hierarchy


# --- GPUs -----------------------------------------------------------------------------------------


def visible_gpus(driver: Path = DRIVER) -> int:
    """Returns the number of GPUs that a process started here would see, without importing torch: what `-n auto` means.

    In this order: CUDA_VISIBLE_DEVICES, `nvidia-smi -L`, the driver's own directory.
    """
    present = _present_gpus(driver)
    named = variable("CUDA_VISIBLE_DEVICES")
    if named is None:
        return present
    entries = [entry.strip() for entry in named.split(",")] if named.strip() else []
    valid = [entry.isdecimal() or entry.startswith(("GPU-", "MIG-")) for entry in entries]
    return min(present, [*valid, False].index(False))  # CUDA counts up to the first entry that is no device


def _present_gpus(driver: Path) -> int:
    try:
        listing = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, errors="replace", check=False, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return len(list(driver.iterdir())) if driver.is_dir() else 0
    lines = listing.stdout.splitlines()
    slices = sum(line.strip().startswith("MIG") for line in lines)
    return slices or sum(line.startswith("GPU ") for line in lines)


# --- memory ---------------------------------------------------------------------------------------


def out_of_memory_kills(root: Path = MACHINE) -> int:
    """Returns how many processes the kernel killed because memory ran out: of this group, else of this machine."""
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
            found[version] = _count(directory / _COUNTERS[version])
    counts = [count for count in found.values() if count is not None]
    return sum(counts) if counts else None


def _count(file: Path, name: str = "oom_kill") -> int | None:
    words = [line.split() for line in (read_if_there(file) or "").splitlines()]
    return next((int(pair[1]) for pair in words if pair[0] == name), None)


def check_room(ranks: int, root: Path = MACHINE) -> None:
    """Refuses more ranks than this host could hold, whatever they do: it would stop responding, and then kill."""
    left, _ = read_memory(root)
    if ranks * BYTES_OF_A_RANK > left:
        needed, free = (f"{size / 1e9:.1f} GB" for size in (ranks * BYTES_OF_A_RANK, left))
        most = max(1, left // BYTES_OF_A_RANK)
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
    """Returns the bytes of cached files of a group, which the kernel frees before it refuses memory.

    They count as the group's own use, and fill it up to its limit once enough has been read.
    """
    prefix = "" if version == 2 else "total_"  # with those of the groups below, as the use itself
    return sum(_count(folder / "memory.stat", f"{prefix}{kind}_file") or 0 for kind in ("active", "inactive"))


def _number(file: Path) -> int | None:
    text = (read_if_there(file) or "").strip()
    return int(text) if text.isdecimal() else None


# --- cores in use ---------------------------------------------------------------------------------


def busy_cores(cores: Collection[int], root: Path = MACHINE) -> float:
    """Returns how many of some cores were busy while this process slept, on average; 0 where /proc/stat does not say.

    The load average covers the last minute, and so what the user has just run.
    """
    before = _ticks(root)
    time.sleep(BUSY_WINDOW_S)
    after = _ticks(root)
    known = [(core, after[core][0] - whole) for core, (whole, _) in before.items() if core in cores and core in after]
    return sum(1 - (after[core][1] - before[core][1]) / passed for core, passed in known if passed > 0)


def _ticks(root: Path) -> dict[int, tuple[int, int]]:
    """Returns, by core, its ticks in all and the idle ones (proc_stat(5)).

    Columns: user, nice, system, idle, iowait, irq, softirq, steal.
    """
    lines = (read_if_there(root / "proc/stat") or "").splitlines()
    rows = (line.split() for line in lines if re.match(r"cpu\d", line))
    counts = {int(name[3:]): list(map(int, columns[:8])) for name, *columns in rows}
    return {core: (sum(columns), columns[3] + columns[4]) for core, columns in counts.items()}
