"""All-reduces and a training step over MPI, beside gloo and shared memory; on an idle machine and on a busy one.

One job of mpiexec holds all of it: groups of the backends mpi (both its ways of waiting), gloo and samestep, in the
same ranks, taken in turn. Then as many other processes are busy as there are cores, and the same is done again: there
MPI libraries, which wait by spinning, take the cores from the ranks that they wait for.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import samestep  # noqa: F401  (registers the backends)
from samestep.bench.allreduce import BLOCK_BYTES, KIB, MIB, MOST_CALLS, size_text
from samestep.bench.harness import Comparison, Options, Report, alternate
from samestep.bench.workloads import MLP
from samestep.errors import UsageError
from samestep.launch.hosts import mpiexec
from samestep.rankenv import child_environment
from samestep.runtime.mpi.library import load

SIZES = (4, 64 * KIB, MIB, 25 * MIB, 100 * MIB)
GROUPS: dict[str, dict[str, Any]] = {
    "polling": {"backend": "mpi", "pg_options": {"waiting": "polling"}},
    "blocking": {"backend": "mpi", "pg_options": {"waiting": "blocking"}},
    "gloo": {"backend": "gloo"},
    "samestep": {"backend": "samestep"},
}
PROMISED = 1.2  # of gloo's time at most, by the way of waiting that ranks without cores of their own get
STEPS = 2  # in a block
ROWS = ("faster_from", "to")
SPIN = "while True: pass"

Rows = list[tuple[str, str, dict[str, list[float]]]]


def run(options: Options) -> Report:
    if options.ranks < 2:
        raise UsageError("an all-reduce needs 2 ranks or more: samestep bench mpi -n 2")
    cores = len(os.sched_getaffinity(0))
    comparisons: list[Comparison] = []
    conditions: dict[str, Any] = {}
    for busy in (0, cores):
        with _busy(busy):
            rows, conditions = _job(options)
        comparisons += [one for row in rows for one in _comparisons(*row, "busy, " if busy else "")]
    for one in comparisons:
        lower, upper = one.interval
        one.figures.update(zip(ROWS, (1 / upper, 1 / lower), strict=True))  # as times faster
    return Report("mpi", comparisons, {"ranks": options.ranks, "cores": cores, **conditions}, ROWS)


def _comparisons(name: str, unit: str, times: dict[str, list[float]], prefix: str) -> list[Comparison]:
    pairs = [
        ("polling", "gloo", PROMISED),
        ("blocking", "gloo", None),
        ("polling", "samestep", None),
        ("samestep", "gloo", None),
    ]
    return [
        Comparison(f"{prefix}{name}, {ours} / {theirs}", unit, times[ours], times[theirs], most)
        for ours, theirs, most in pairs
    ]


@contextlib.contextmanager
def _busy(count: int) -> Iterator[None]:
    spinning = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(count)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def _job(options: Options) -> tuple[Rows, dict[str, Any]]:
    program = mpiexec.mpiexec()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "times.json"
        words = [sys.executable, "-P", "-m", "samestep.bench.mpi", str(options.repeats), str(out)]
        command, env = mpiexec.command(options.ranks, words, program), child_environment({"OMP_NUM_THREADS": "1"})
        done = subprocess.run(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace", check=False
        )
        if done.returncode:
            raise UsageError(f"the job of {program} failed:\n{done.stdout.strip()}")
        found = json.loads(out.read_text(encoding="utf-8"))
    return found["rows"], found["conditions"]


def main() -> None:
    """Runs in every rank; rank 0 writes the times."""
    repeats, out = int(sys.argv[1]), Path(sys.argv[2])
    dist.init_process_group("mpi")
    groups = {name: dist.new_group(**how) for name, how in GROUPS.items()}
    rows = [
        *((size_text(nbytes), "all-reduce", _all_reduces(groups, nbytes, repeats)) for nbytes in SIZES),
        ("step", "step", _steps(groups, repeats)),
    ]
    if dist.get_rank() == 0:
        version = " ".join(load().Get_library_version().split(",")[0].split("\n")[0].split())
        conditions = {"mpi": version, "torch": torch.__version__, "threads_per_rank": torch.get_num_threads()}
        out.write_text(json.dumps({"rows": rows, "conditions": conditions}), encoding="utf-8")
    dist.destroy_process_group()


def _all_reduces(groups: dict[str, dist.ProcessGroup], nbytes: int, repeats: int) -> dict[str, list[float]]:
    tensor = torch.zeros(nbytes // 4)
    calls = min(MOST_CALLS, max(1, BLOCK_BYTES // nbytes))

    def block(group: dist.ProcessGroup) -> None:
        for _ in range(calls):
            dist.all_reduce(tensor, group=group)

    return _in_turn(lambda group: functools.partial(block, group), groups, repeats, calls)


def _steps(groups: dict[str, dist.ProcessGroup], repeats: int) -> dict[str, list[float]]:
    return _in_turn(_stepping, groups, repeats, STEPS)


def _stepping(group: dist.ProcessGroup) -> Callable[[], None]:
    """Steps of a network of 5 million parameters, wrapped in DistributedDataParallel over a group."""
    network = MLP.network()
    model = DistributedDataParallel(network, process_group=group, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(network.parameters(), 0.01)
    x, y = torch.randn(MLP.batch, *MLP.shape), torch.randint(0, MLP.classes, (MLP.batch,))

    def steps() -> None:
        for _ in range(STEPS):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    return steps


def _in_turn(
    block_of: Callable[[Any], Callable[[], None]], groups: dict[str, dist.ProcessGroup], repeats: int, units: int
) -> dict[str, list[float]]:
    blocks = map(block_of, groups.values())
    times = alternate(*blocks, pairs=repeats, align=lambda: dist.barrier(group=groups["gloo"]))
    return {name: [each / units for each in seconds] for name, seconds in zip(groups, times, strict=True)}


if __name__ == "__main__":
    main()
