"""How busy the cores are before anything is measured on them: what others leave idle, over a moment.

The load average tells of the last minute, and so of what the user himself has just run.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection
from pathlib import Path

__all__: list[str] = []

MACHINE = Path("/")
LOOKS_FOR_S = 0.2


def busy_cores(cores: Collection[int], root: Path = MACHINE) -> float:
    """Returns how many of some cores were busy while this process slept, on average; 0 where nobody says."""
    before = _ticks(root)
    time.sleep(LOOKS_FOR_S)
    after = _ticks(root)
    told = [(core, after[core][0] - whole) for core, (whole, _) in before.items() if core in cores and core in after]
    return sum(1 - (after[core][1] - before[core][1]) / passed for core, passed in told if passed > 0)


def _ticks(root: Path) -> dict[int, tuple[int, int]]:
    """Of each core, the time that it has been there and the part that it was idle: proc_stat(5).

    Columns: user, nice, system, idle, iowait, irq, softirq, steal.
    """
    try:
        lines = (root / "proc/stat").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    rows = (line.split() for line in lines if re.match(r"cpu\d", line))
    counts = {int(name[3:]): list(map(int, columns[:8])) for name, *columns in rows}
    return {core: (sum(columns), columns[3] + columns[4]) for core, columns in counts.items()}
