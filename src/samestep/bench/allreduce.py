"""An all-reduce among the ranks of this host, in shared memory and through gloo, from 4 bytes to 256 MiB.

The tensors of one size are taken in turn, and are together larger than the processors' cache, so that none is in it
when its turn comes; nccl-tests and OSU's benchmarks use one again and again. Bandwidths are nccl-tests':

    algbw    bytes of a rank's tensor / time
    busbw    algbw x 2 (N - 1) / N, what a link must carry at least; comparable between numbers of ranks

A tensor that is registered has been moved into shared memory before, as buckets of gradients are; any other is copied
through it piece by piece. The limit is what the memory allows: each of N ranks' n bytes are read once and written once,
2 N n bytes, at the speed at which all ranks together copied a large tensor in the same run. It can be undercut: who
copies reads each line of memory that it is about to write once more, and an all-reduce has just read it.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

import samestep
from samestep.bench.harness import Comparison, Options, Report, alternate
from samestep.collectives.shared_memory import SHARED_MEMORY, SharedMemoryAllReduce
from samestep.errors import UsageError
from samestep.launch.functions.spawn import spawn
from samestep.runtime.hosts import open_counters
from samestep.runtime.world import World

KIB, MIB = 1 << 10, 1 << 20
SIZES = (4, KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 25 * MIB, 100 * MIB, 256 * MIB)
WARM = 128 * MIB  # tensors of one size together, so that each is cold when its turn comes
MOST_TENSORS = 64
BLOCK_BYTES = 8 * MIB  # that a block of work is about
MOST_CALLS = 64  # in a block
COPIED = 64 * MIB  # what the limit is measured with

KINDS = ("registered", "copied")


@dataclass(frozen=True)
class Timed:
    kind: str
    nbytes: int
    ours: list[float]
    theirs: list[float]


def run(options: Options) -> Report:
    if options.ranks < 2:
        raise UsageError("an all-reduce needs 2 ranks or more: samestep bench allreduce -n 2")
    timed, bytes_per_s, conditions = spawn(compare, options.ranks, options.repeats, SIZES, progress=False)[0]
    comparisons = [_comparison(one, options.ranks, bytes_per_s) for one in timed]
    return Report("allreduce", comparisons, conditions, ("busbw_GB_per_s", "limits"), _curves(timed, options))


def _comparison(timed: Timed, ranks: int, bytes_per_s: float) -> Comparison:
    seconds = median(timed.ours)
    least = 2 * ranks * timed.nbytes / bytes_per_s
    figures = {
        "algbw_GB_per_s": timed.nbytes / seconds / 1e9,
        "busbw_GB_per_s": timed.nbytes / seconds / 1e9 * 2 * (ranks - 1) / ranks,
        "limit_ms": 1e3 * least,
        "limits": seconds / least,
    }
    name = f"{size_text(timed.nbytes)}, {timed.kind}"
    return Comparison(name, "all-reduce", timed.ours, timed.theirs, target(timed.kind, timed.nbytes), figures)


def _curves(timed: list[Timed], options: Options) -> dict[str, list[tuple[float, float]]]:
    factor = 2 * (options.ranks - 1) / options.ranks / 1e9
    sides = [(kind, [(one.nbytes, one.ours) for one in timed if one.kind == kind]) for kind in KINDS]
    sides.append(("gloo", [(one.nbytes, one.theirs) for one in timed if one.kind == KINDS[0]]))
    return {name: [(nbytes, factor * nbytes / median(times)) for nbytes, times in points] for name, points in sides}


def target(kind: str, nbytes: int) -> float:
    if kind == "registered" and nbytes >= MIB:
        return 1 / 3.5 if nbytes <= 25 * MIB else 1 / 2.5
    return 1.0


def size_text(nbytes: int) -> str:
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if nbytes >= unit:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} B"


def compare(repeats: int, sizes: tuple[int, ...]) -> tuple[list[Timed], float, dict[str, object]]:
    """Runs on every rank; returns the times, the bytes a second that all ranks together copy, and the conditions."""
    with samestep.world(device="cpu") as world:
        counters = open_counters(world.data)
        if counters is None:
            raise UsageError("the ranks of this machine cannot open each other's memory: there is nothing to compare")
        memory = SharedMemoryAllReduce(counters)
        speed = copied_per_s(memory)
        timed = [one for nbytes in sizes for one in _timed(world, memory, nbytes, repeats)]
        conditions: dict[str, object] = {
            "ranks": world.size,
            "threads_per_rank": torch.get_num_threads(),
            "torch": torch.__version__,
            "copied_GB_per_s": round(speed / 1e9, 1),
        }
        return timed, speed, conditions


def copied_per_s(memory: SharedMemoryAllReduce) -> float:
    """Returns the bytes, read and written, that all ranks together copy in a second. Collective."""
    source, target = torch.ones(COPIED // 4), torch.zeros(COPIED // 4)
    seconds, _ = alternate(lambda: target.copy_(source), lambda: None, pairs=20, align=_aligned(memory))
    at_once = min(memory.counters.size, len(os.sched_getaffinity(0)))  # more ranks than cores copy by turns
    return 2 * COPIED * at_once / min(seconds)


def _aligned(memory: SharedMemoryAllReduce) -> Callable[[], object]:
    return lambda: memory.counters.exchange(0)


def _timed(world: World, memory: SharedMemoryAllReduce, nbytes: int, repeats: int) -> list[Timed]:
    count = min(MOST_TENSORS, max(1, -(-WARM // nbytes)))
    plain = [torch.ones(nbytes // 4) for _ in range(count)]
    moved = [torch.ones(nbytes // 4) for _ in range(count)]
    regions = [memory.register(tensor) for tensor in moved]
    if None in regions:
        raise UsageError(f"no room for {count} tensors of {size_text(nbytes)} in {SHARED_MEMORY}: make it larger")

    def registered(number: int) -> None:
        region = regions[number]
        assert region is not None
        memory.start(region)
        memory.wait_all()

    ways: dict[str, Callable[[int], object]] = {
        "registered": registered,
        "copied": lambda number: memory.all_reduce(plain[number]),
        "gloo": lambda number: dist.all_reduce(plain[number], group=world.data.group),
    }
    _check(world, memory, ways, plain, moved)
    calls = min(MOST_CALLS, max(1, BLOCK_BYTES // nbytes))
    turns = itertools.cycle(range(count))

    def block(way: Callable[[int], object]) -> Callable[[], object]:
        return lambda: [way(next(turns)) for _ in range(calls)]

    found = []
    for kind in KINDS:
        times = alternate(block(ways[kind]), block(ways["gloo"]), pairs=repeats, align=_aligned(memory))
        ours, theirs = ([seconds / calls for seconds in side] for side in times)
        found.append(Timed(kind, nbytes, ours, theirs))
        for tensor in (*plain, *moved):
            tensor.fill_(1)  # sums of sums overflow in the end
    return found


def _check(
    world: World,
    memory: SharedMemoryAllReduce,
    ways: dict[str, Callable[[int], object]],
    plain: list[Tensor],
    moved: list[Tensor],
) -> None:
    """All ways must give the sum, before any of them is timed."""
    for name, way in ways.items():
        tensor = (moved if name == "registered" else plain)[0]
        tensor.fill_(world.rank + 1)
        memory.counters.exchange(0)
        way(0)
        expected = world.size * (world.size + 1) / 2
        if not bool((tensor == expected).all()):
            raise RuntimeError(f"{name}: {tensor[:4].tolist()} is not the sum {expected}")
        tensor.fill_(1)
