"""What the guard of the replicas costs a step: every 16th compares all weights, and all others carry a share of that.

One model, one loop and one batch, so that neither side has luckier memory, and gradients added in shared memory, where
steps are shortest; only the guard is awake in one block of each pair, which then holds one check:

    guard     awake              asleep             asleep             awake
    steps     1 2 3 … 15 16 ✓    1 2 3 … 15 16      1 2 3 … 15 16      1 2 3 … 15 16 ✓
              └────────────── a pair ─────────┘     └────────────── a pair ─────────┘

Half a percent is little beside what a busy machine does to a block, so a check is also timed by itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import samestep
from samestep.bench.harness import Comparison, Options, Report, alternate, training_device
from samestep.bench.step import align, setting, steps_of
from samestep.bench.workloads import MLP
from samestep.errors import UsageError
from samestep.launch.functions.spawn import spawn
from samestep.replicas.drift import DriftGuard, DriftMonitor
from samestep.runtime.world import World

PROMISE = 1.005  # at most half a percent of a step, at every 16
EVERY = 16
CHECKS = 30  # timed by themselves
NAME = f"a check every {EVERY} steps / none"


def run(options: Options) -> Report:
    if options.ranks < 2:
        raise UsageError("the guard compares replicas, of which one rank has one: samestep bench guard -n 2")
    device = training_device(options.ranks)
    ours, theirs, check_s, conditions = spawn(compare, options.ranks, options.repeats, device, progress=False)[0]
    return Report("guard", [Comparison(NAME, "step", ours, theirs, PROMISE, figures(check_s, theirs))], conditions)


def figures(check_s: list[float], theirs: tuple[float, ...]) -> dict[str, float]:
    """Returns what a check takes by itself, and what share of a block of steps that is."""
    check = median(check_s)
    return {"ms_per_check": 1e3 * check, "percent_of_a_step": 100 * check / (EVERY * median(theirs))}


def compare(
    repeats: int, device: str | None
) -> tuple[tuple[float, ...], tuple[float, ...], list[float], dict[str, Any]]:
    """Runs on every rank; returns seconds per step of both, seconds per check, and the conditions. Collective."""
    with samestep.world(device=device) as world:
        model = samestep.replicate(MLP.network().to(world.device), world)
        guard = DriftMonitor(model.module, world, DriftGuard(every=EVERY))
        steps = steps_of(MLP, model, world)
        blocks = (lambda: block(steps, guard, awake=True), lambda: block(steps, guard, awake=False))
        times = alternate(*blocks, pairs=repeats, align=lambda: align(world))
        ours, theirs = (tuple(seconds / EVERY for seconds in side) for side in times)
        return ours, theirs, checks(guard, steps, world), setting(world) | {"steps_per_block": EVERY}


def block(steps: Iterator[None], guard: DriftMonitor, *, awake: bool) -> None:
    guard.active = awake
    for _ in range(EVERY):
        next(steps)


def checks(guard: DriftMonitor, steps: Iterator[None], world: World) -> list[float]:
    """Returns the seconds of some checks, each behind a step, as it would be. Collective."""
    guard.active = False
    found = []
    for _ in range(CHECKS):
        next(steps)
        align(world)
        start = time.perf_counter()
        guard.check()
        found.append(time.perf_counter() - start)
    return found
