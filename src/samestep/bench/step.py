"""What a training step costs here, beside the loop that one would write by hand with DistributedDataParallel.

Both sides train the same network on the same data with the same optimizer, in the same processes, a block of steps each
in turn, and both give DistributedDataParallel views into its buckets. Compared are

    what samestep adds     both load through torch's DataLoader and add over the backend: the global order, the exact
                           mean over uneven shares, the step's agreement, the global loss; the other loop has none
    what samestep saves    both on one batch, samestep as it comes, with gradients in shared memory: for networks that
                           compute little or much per byte of them; a third loop does without communication, and
                           for one network accelerate and Lightning Fabric take part where they are installed
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import samestep
from samestep.bench.harness import Comparison, Options, Report, alternate, in_sets, training_device
from samestep.bench.workloads import CNN, MLP, TRANSFORMER, Workload
from samestep.launch.functions.spawn import spawn
from samestep.replicas.reduction import Reduce
from samestep.runtime.world import World

PROMISE = 1.02  # at most 2 % more than the hand-written loop, over gloo
FASTER = ((CNN, 1 / 1.45), (MLP, 1 / 1.4), (TRANSFORMER, 1 / 1.15))  # of its time at most, as it comes
LOST = 1 / 3  # of the time that it loses to communication, at most
SETS = 4  # of processes: where a loop's memory happens to lie is worth 2 % either way, for as long as its process lives
STEPS = 2  # in a block: few, so that many pairs fit in a minute and what disturbs a machine spoils few of them


def run(options: Options) -> Report:
    device = training_device(options.ranks)
    times, conditions = _timed(MLP, False, device, options)
    name = "what samestep adds, both over the backend: samestep / hand-written DistributedDataParallel"
    comparisons = [Comparison(name, "step", times[0], times[1], PROMISE)]
    for task, most in FASTER if options.ranks > 1 else ():
        (ours, theirs, alone), _ = _timed(task, True, device, options)
        comparisons.append(
            Comparison(
                f"{task.name}, as it comes: samestep / hand-written DistributedDataParallel",
                "step",
                ours,
                theirs,
                most if device == "cpu" else None,
                lost(ours, theirs, alone),
            )
        )
    for peer in installed_peers() if options.ranks > 1 else ():
        (ours, theirs), _ = _timed(MLP, True, device, options, peer)
        comparisons.append(Comparison(f"{MLP.name}, as it comes: samestep / {peer}", "step", ours, theirs))
    return Report("step", comparisons, conditions)


def lost(ours: tuple[float, ...], theirs: tuple[float, ...], alone: tuple[float, ...]) -> dict[str, float]:
    """Returns what both lose to communication, their step less the same step without, and the limit of that.

    The limit is what the other loop takes in times of the step without communication: nobody who trains with
    DistributedDataParallel's values can be more times faster than that. All are medians.
    """
    without = median(alone)
    mine, other = median(ours) - without, median(theirs) - without
    share = mine / other if other > 0 else 0.0
    return {
        "lost_ms": 1e3 * mine,
        "lost_by_theirs_ms": 1e3 * other,
        "lost_share": share,
        "target_at_most": LOST,
        "times_faster_at_best": median(theirs) / without,
    }


def _timed(
    task: Workload, as_it_comes: bool, device: str | None, options: Options, peer: str | None = None
) -> tuple[list[tuple[float, ...]], dict[str, Any]]:
    def measure(pairs: int, ours_first: bool) -> Any:
        return spawn(compare, options.ranks, task, as_it_comes, device, pairs, ours_first, peer, progress=False)[0]

    times, conditions = in_sets(options.repeats, SETS, measure)
    return times, conditions[-1]


def compare(
    task: Workload, as_it_comes: bool, device: str | None, repeats: int, ours_first: bool, peer: str | None = None
) -> tuple[list[tuple[float, ...]], dict[str, Any]]:
    """Runs on every rank; returns seconds per step of each loop, and the conditions. Collective.

    As it comes, steps are on one batch, with gradients in shared memory, and may be compared with those of another
    library; else with loaders, over the backend.
    """
    with samestep.world(device=device) as world:
        if as_it_comes:
            loops = _as_it_comes(task, peer, world)
        else:
            loops = [our_steps(task, task.network(), world), their_steps(task, task.network(), world)]
        for steps in loops if ours_first else reversed(loops):
            next(steps)  # takes its memory now
        return time_loops(loops, world, repeats), setting(world, task)


def _as_it_comes(task: Workload, peer: str | None, world: World) -> list[Iterator[None]]:
    ours = samestep.replicate(task.network().to(world.device), world)
    if peer is not None:
        network = task.network().to(world.device)
        model, optimizer, backward = PEERS[peer][1](network, sgd(network), world)
        return [steps_of(task, ours, world), steps_of(task, model, world, optimizer, backward)]
    theirs, alone = _wrapped(task.network().to(world.device), world), task.network().to(world.device)
    return [steps_of(task, model, world) for model in (ours, theirs, alone)]


def steps_of(
    task: Workload, model: nn.Module, world: World, optimizer: Any = None, backward: Any = torch.Tensor.backward
) -> Iterator[None]:
    """Trains on this rank's first batch, one step for each item."""
    x, y = task.batch_of(world)
    optimizer = optimizer or sgd(model)
    while True:
        backward(F.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        yield


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def our_steps(task: Workload, network: nn.Module, world: World, *, reduce: Reduce | None = "gloo") -> Iterator[None]:
    """Trains with samestep, one step for each item; `reduce` says how gradients are added, None as it comes."""
    model = samestep.replicate(network.to(world.device), world, reduce=reduce)
    optimizer = sgd(model)
    batches = samestep.shards(task.dataset(), world, batch_size=task.batch * world.size)
    while True:
        for x, y in batches:
            loss = batches.mean(F.cross_entropy(model(x), y, reduction="none"))
            loss.backward()  # type: ignore[no-untyped-call]
            if batches.step_ends:
                optimizer.step()
                optimizer.zero_grad()
                yield


def their_steps(task: Workload, network: nn.Module, world: World) -> Iterator[None]:
    model = _wrapped(network.to(world.device), world)
    optimizer = sgd(model)
    data = task.dataset()
    sampler: DistributedSampler[Any] = DistributedSampler(data, world.size, world.rank)
    on_cuda = world.device.type == "cuda"
    loader = DataLoader(data, task.batch, sampler=sampler, pin_memory=on_cuda)
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        for x, y in loader:
            x, y = x.to(world.device, non_blocking=True), y.to(world.device, non_blocking=True)
            loss = F.cross_entropy(model(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            yield


def _wrapped(model: nn.Module, world: World) -> nn.Module:
    if world.size == 1:
        return model
    devices = [world.device] if world.device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)


def advance(loop: Iterator[None], steps: int = STEPS) -> None:
    for _ in range(steps):
        next(loop)


def time_loops(
    loops: Sequence[Iterator[None]], world: World, pairs: int, steps: int = STEPS
) -> list[tuple[float, ...]]:
    """Times blocks of so many steps of each loop in turn; returns seconds a step. Collective."""
    blocks = [functools.partial(advance, loop, steps) for loop in loops]
    times = alternate(*blocks, pairs=pairs, align=lambda: align(world))
    return [tuple(seconds / steps for seconds in side) for side in times]


def align(world: World) -> None:
    """Waits until every rank is here and its device has done all it was given. Collective."""
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    world.barrier()


def setting(world: World, task: Workload = MLP) -> dict[str, Any]:
    return {
        "ranks": world.size,
        "device": str(world.device),
        "backend": world.backend,
        "threads_per_rank": torch.get_num_threads(),
        "torch": torch.__version__,
        "parameters": sum(parameter.numel() for parameter in task.network().parameters()),
        "batch_size": task.batch * world.size,
        "steps_per_block": STEPS,
    }


# --- the same loop as other libraries on DistributedDataParallel have it written ----------------


def installed_peers() -> list[str]:
    return [name for name, (module, _) in PEERS.items() if find_spec(module) is not None]


def _accelerate(network: Any, optimizer: Any, world: World) -> tuple[Any, Any, Callable[[Any], Any]]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=world.device.type == "cpu")
    model, optimizer = accelerator.prepare(network, optimizer)
    return model, optimizer, accelerator.backward


def _fabric(network: Any, optimizer: Any, world: World) -> tuple[Any, Any, Callable[[Any], Any]]:
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator=world.device.type, devices=world.size, strategy="ddp")
    fabric.launch()
    model, optimizer = fabric.setup(network, optimizer)
    return model, optimizer, fabric.backward


PEERS = {"accelerate": ("accelerate", _accelerate), "Lightning Fabric": ("lightning_fabric", _fabric)}
