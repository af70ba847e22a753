"""What buckets chosen by measurement gain, beside DistributedDataParallel's default of 25 MiB.

Both train the same network on one batch in the same processes, a block of steps each in turn, once the buckets of the
one are decided; over gloo, where all-reduces run beside the backward, and as it comes, where ranks of one host add in
shared memory. The target is not a gain, for where the default is right there is none: it is that measuring never costs
more than the noise of measuring.
"""

from __future__ import annotations

from statistics import mean, median
from typing import Any

import samestep
from samestep.bench.harness import Comparison, Options, Report, in_sets, training_device
from samestep.bench.step import setting, steps_of, time_loops
from samestep.bench.workloads import CNN, MLP, TRANSFORMER, Workload
from samestep.errors import UsageError
from samestep.launch.functions.spawn import spawn
from samestep.replicas.reduction import Reduce

PROMISE = 1.02  # of the default's time at most
WAYS: tuple[Reduce | None, ...] = ("gloo", None)
SETS = 2  # of processes, each of which takes some seventy steps to decide
UNDECIDED = 100  # steps after which something is wrong


def run(options: Options) -> Report:
    if options.ranks < 2:
        raise UsageError("buckets need 2 ranks or more: samestep bench buckets -n 2")
    device = training_device(options.ranks)
    comparisons: list[Comparison] = []
    conditions: dict[str, Any] = {}
    for reduce in WAYS:
        for task in (MLP, CNN, TRANSFORMER):
            comparison, conditions = _timed(task, reduce, device, options)
            comparisons.append(comparison)
    return Report("buckets", comparisons, conditions, ("taken", "buckets", "hidden_percent"))


def _timed(
    task: Workload, reduce: Reduce | None, device: str | None, options: Options
) -> tuple[Comparison, dict[str, Any]]:
    """Times one network in several sets of processes, each of which decides for itself."""

    def measure(pairs: int, auto_first: bool) -> tuple[Any, Any]:
        times, *more = spawn(compare, options.ranks, task, reduce, device, pairs, auto_first, progress=False)[0]
        return times, more

    (ours, theirs), found = in_sets(options.repeats, SETS, measure)
    taken, buckets, hidden = zip(*(plan for plan, _ in found), strict=True)
    figures = {"taken": mean(taken), "buckets": median(buckets), "hidden_percent": 100 * median(hidden)}
    name = f"{task.name}, {'as it comes' if reduce is None else 'over the backend'}"
    return Comparison(name, "step", ours, theirs, PROMISE, figures), found[-1][1]


def compare(
    task: Workload, reduce: Reduce | None, device: str | None, repeats: int, auto_first: bool
) -> tuple[list[tuple[float, ...]], tuple[bool, int, float], dict[str, Any]]:
    """Runs on every rank; returns seconds per step of both, what was chosen, and the conditions. Collective."""
    with samestep.world(device=device) as world:
        models = {}
        for buckets in ("auto", None) if auto_first else (None, "auto"):
            network = task.network().to(world.device)
            models[buckets] = samestep.replicate(network, world, buckets=buckets, reduce=reduce)
        auto, default = (steps_of(task, models[buckets], world) for buckets in ("auto", None))
        steps = 0
        while (plan := models["auto"].buckets) is None:
            next(auto)
            steps += 1
            if steps == UNDECIDED:
                raise RuntimeError(f"no buckets were chosen in {UNDECIDED} steps")
        times = time_loops((auto, default), world, repeats)
        chosen = (plan.takes_proposed, len(plan.chosen.buckets), plan.chosen.achieved_hidden or 0.0)
        return times, chosen, setting(world, task)
