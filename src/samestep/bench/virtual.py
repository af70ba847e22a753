"""What virtual ranks cost a training step, beside the same ranks without them.

The network, the data and the loop are those of `bench step`. With as many virtual ranks as ranks the price is that
gradients travel when backward is over, not during it; with more of them it is also that a slice is a smaller batch,
which uses the machine less well, and that one CPU thread does the work of several where a rank has several.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

import samestep
from samestep.bench.harness import Comparison, Options, Report, alternate, training_device
from samestep.bench.step import STEPS, advance, align, our_steps, setting
from samestep.bench.workloads import MLP
from samestep.errors import UsageError
from samestep.launch.functions.spawn import spawn
from samestep.topology import is_power_of_two

SLICES = (1, 2, 4)  # on each rank


def run(options: Options) -> Report:
    if not is_power_of_two(options.ranks):
        raise UsageError(f"virtual ranks are dealt out to 1, 2, 4, … ranks, not to {options.ranks}")
    device = training_device(options.ranks)
    comparisons = []
    for slices in SLICES:
        ours, theirs, conditions = spawn(compare, options.ranks, options.repeats, device, slices, progress=False)[0]
        name = f"virtual_ranks={slices * options.ranks} / without"
        comparisons.append(Comparison(name, "step", ours, theirs))
    return Report("virtual", comparisons, conditions)


def compare(repeats: int, device: str | None, slices: int) -> tuple[list[float], list[float], dict[str, Any]]:
    """Runs on every rank; returns seconds per step of both loops, and the conditions. Collective."""
    with samestep.world(device=device) as plain:
        threads = torch.get_num_threads()
        with samestep.world(device=device, virtual_ranks=slices * plain.size) as sliced:
            ours, theirs = (our_steps(MLP, MLP.network(), world, reduce=None) for world in (sliced, plain))
            blocks = (lambda: block(ours, 1), lambda: block(theirs, threads))
            times = alternate(*blocks, pairs=repeats, align=lambda: align(plain))
            each = [[seconds / STEPS for seconds in side] for side in times]
            conditions = setting(plain) | {"samples_per_rank": MLP.batch, "threads_per_rank": threads}
            return each[0], each[1], conditions


def block(steps: Iterator[None], threads: int) -> None:
    """Takes steps on so many CPU threads; virtual ranks have set one for the whole process."""
    torch.set_num_threads(threads)
    advance(steps)
