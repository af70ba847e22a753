"""The time until N ranks are at work, beside torchrun, and beside one plain process.

Both launchers run the same script, unchanged: it imports torch, joins a gloo group, sums one number over the ranks
and notes the clock, which all processes of a machine share. What is timed is from the command's start to the slowest
rank's first sum (the command's own end would count torchrun's slower way out as well).

    torchrun          python + torch  ->  N x (python + torch), at once, on as many cores as there are
    samestep run      python ->  torch once  ->  N forks
    the limit         python + torch, once: nothing that uses torch is faster
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from samestep.bench.harness import Comparison, Options, Report, interleave
from samestep.errors import SamestepError
from samestep.rankenv import child_environment

MOST_OF_TORCHRUN = {4: 1 / 2.8}  # targets for so many ranks on 2 cores
MOST_OF_ONE_PROCESS = {2: 1.3}
RUN_DIR = "{place}/run"
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}

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
    ranks, pairs = options.ranks, options.repeats
    ours = functools.partial(_first_sum, ["-P", "-m", "samestep", "run", "-n", str(ranks), "--run-dir", RUN_DIR], ranks)
    module = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    rivals = [
        ("torchrun", functools.partial(_first_sum, module, ranks), MOST_OF_TORCHRUN.get(ranks)),
        ("one plain process", functools.partial(_first_sum, [], 1, ALONE), MOST_OF_ONE_PROCESS.get(ranks)),
    ]
    comparisons = []
    for other, theirs, most in rivals:
        mine, others = interleave(ours, theirs, pairs=pairs, warmup=1)
        comparisons.append(Comparison(f"samestep run / {other}, to the first sum", "start", mine, others, most))
    setting = {"ranks": ranks, "cores": len(os.sched_getaffinity(0)), "work": "import torch, join, one sum"}
    return Report("launch", comparisons, setting)


def _first_sum(launcher: Sequence[str], ranks: int, variables: Mapping[str, str] | None = None) -> float:
    """Returns the seconds from a command's start to the slowest rank's first sum."""
    with tempfile.TemporaryDirectory(prefix="samestep-bench-") as place:
        script = Path(place) / "first_sum.py"
        script.write_text(SCRIPT, encoding="utf-8")
        command = [sys.executable, *(word.format(place=place) for word in launcher), str(script), place]
        environment = child_environment({**(variables or {}), "OMP_NUM_THREADS": "1"})
        began = time.clock_gettime(time.CLOCK_MONOTONIC)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace", check=False)
        if done.returncode != 0:
            raise SamestepError(f"{' '.join(command)} ended with code {done.returncode}: {done.stderr[-2000:]}")
        return max(float((Path(place) / str(rank)).read_text()) for rank in range(ranks)) - began
