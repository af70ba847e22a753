"""How many GPUs this process may use, without importing torch: what `-n auto` means.

In this order: CUDA_VISIBLE_DEVICES, `nvidia-smi -L`, the driver's own directory. torchrun's `auto` imports torch and
starts CUDA in the launcher to count.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from samestep.rankenv import variable

__all__: list[str] = []

DRIVER = Path("/proc/driver/nvidia/gpus")


def visible_gpus(driver: Path = DRIVER) -> int:
    """Returns the number of GPUs that a process started here would see."""
    present = _present_gpus(driver)
    named = variable("CUDA_VISIBLE_DEVICES")
    return present if named is None else min(present, _named_gpus(named))


def _named_gpus(text: str) -> int:
    """Counts as CUDA does: up to the first entry that is no device."""
    entries = [entry.strip() for entry in text.split(",")] if text.strip() else []
    valid = [entry for entry in entries if entry.isdecimal() or entry.startswith(("GPU-", "MIG-"))]
    return len(valid) if valid == entries else entries.index(next(e for e in entries if e not in valid))


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
