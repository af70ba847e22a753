"""The time until N ranks are at work, beside torchrun, and beside one plain process.

Both launchers run the same script, unchanged: it imports torch, joins a gloo group, sums one number over the ranks
and notes the clock, which all processes of a machine share. What is timed is from the command's start to the slowest
rank's first sum (the command's own end would count torchrun's slower way out as well).

    torchrun          python + torch  ->  N x (python + torch), at once, on as many cores as there are
    samestep run      python ->  torch once  ->  N forks
    the limit         python + torch, once: nothing that uses torch is faster
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from samestep.bench.harness import Comparison, Options, Report, interleave
from samestep.errors import SamestepError
from samestep.rankenv import child_environment

FASTER_THAN_TORCHRUN = {4: 2.8}  # promised for so many ranks on 2 cores
MOST_OF_ONE_PROCESS = {2: 1.3}

SCRIPT = """\
import os, sys, time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
value = torch.ones(1)
dist.all_reduce(value)
with open(os.path.join(sys.argv[1], os.environ["RANK"]), "w") as file:
    file.write(repr(time.clock_gettime(time.CLOCK_MONOTONIC)))
assert value.item() == dist.get_world_size()
dist.destroy_process_group()
"""


def run(options: Options) -> Report:
    with tempfile.TemporaryDirectory(prefix="samestep-bench-") as folder:
        sides = _Sides(Path(folder), options.ranks)
        with_torchrun = interleave(sides.samestep, sides.torchrun, pairs=options.repeats, warmup=1)
        with_one = interleave(sides.samestep, sides.one_process, pairs=options.repeats, warmup=1)
    promised = FASTER_THAN_TORCHRUN.get(options.ranks)
    most = None if promised is None else 1 / promised
    setting = {"ranks": options.ranks, "cores": len(os.sched_getaffinity(0)), "work": "import torch, join, one sum"}
    return Report(
        "launch",
        [
            _comparison("torchrun", with_torchrun, most),
            _comparison("one plain process", with_one, MOST_OF_ONE_PROCESS.get(options.ranks)),
        ],
        setting,
    )


def _comparison(other: str, times: tuple[list[float], ...], most: float | None) -> Comparison:
    ours, theirs = times
    return Comparison(f"samestep run / {other}, to the first sum", "start", tuple(ours), tuple(theirs), most)


class _Sides:
    """The commands that are compared, all on the same script."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self._folder = folder
        self._ranks = ranks
        self._script = folder / "first_sum.py"
        self._script.write_text(SCRIPT, encoding="utf-8")

    def samestep(self) -> float:
        """Seconds to the slowest rank's first sum."""
        return self._time(["-P", "-m", "samestep", "run", "-n", str(self._ranks), "--run-dir"], self._ranks, _run_dir)

    def torchrun(self) -> float:
        """The same under torchrun, with a free port."""
        module = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        return self._time([*module, str(self._ranks)], self._ranks)

    def one_process(self) -> float:
        """The same for one process without a launcher."""
        return self._time([], 1, alone=True)

    def _time(
        self,
        launcher: Sequence[str],
        ranks: int,
        extra: Callable[[Path], list[str]] = lambda _: [],
        *,
        alone: bool = False,
    ) -> float:
        with tempfile.TemporaryDirectory(dir=self._folder) as place:
            stamps = Path(place)
            command = [sys.executable, *launcher, *extra(stamps), str(self._script), place]
            variables = (
                {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"} if alone else {}
            )
            variables |= {"OMP_NUM_THREADS": "1"}
            began = time.clock_gettime(time.CLOCK_MONOTONIC)
            done = subprocess.run(
                command, env=child_environment(variables), capture_output=True, text=True, errors="replace", check=False
            )
            if done.returncode != 0:
                raise SamestepError(f"{' '.join(command)} ended with code {done.returncode}: {done.stderr[-2000:]}")
            return max(float((stamps / str(rank)).read_text()) for rank in range(ranks)) - began


def _run_dir(stamps: Path) -> list[str]:
    return [str(stamps / "run")]
