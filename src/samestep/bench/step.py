"""What a training step costs here, beside the loop that one would write by hand with DistributedDataParallel.

Both sides train the same 5-million-parameter network on the same in-memory data with the same optimizer, in the same
processes, a block of steps each in turn. Both load through torch's DataLoader with its own collation and both give
DistributedDataParallel views into its buckets, so what differs is what samestep adds: the global order, the exact
mean over uneven shares, the step's agreement and the global loss. The hand-written loop has none of these.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from samestep.bench.harness import Comparison, Options, Report, alternate
from samestep.launch.devices import visible_gpus
from samestep.launch.spawn import spawn

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.utils.data import Dataset

    from samestep.runtime.world import World

__all__: list[str] = []

PROMISE = 1.02  # at most 2 % more than the hand-written loop
WIDTHS = (512, 2048, 1536, 512)  # 4,984,832 parameters
SAMPLES = 8192
BATCH_PER_RANK = 64
SETS = 4  # of processes: where a loop's memory happens to lie is worth 2 % either way, for as long as its process lives
STEPS = 2  # in a block: few, so that many pairs fit in a minute and what disturbs a machine spoils few of them


def run(options: Options) -> Report:
    """Starts the ranks, times both loops on them and returns the report."""
    device = None if visible_gpus() >= options.ranks else "cpu"
    ours: list[float] = []
    theirs: list[float] = []
    sets = min(SETS, options.repeats)
    for number in range(sets):
        pairs = (options.repeats + number) // sets  # together as many as asked for
        mine, other, conditions = spawn(compare, options.ranks, pairs, device, number % 2 == 0, progress=False)[0]
        ours += mine
        theirs += other
    name = "samestep / hand-written DistributedDataParallel"
    return Report("step", [Comparison(name, "step", tuple(ours), tuple(theirs), PROMISE)], conditions)


def compare(repeats: int, device: str | None, ours_first: bool) -> tuple[list[float], list[float], dict[str, Any]]:
    """Runs on every rank; returns seconds per step of both loops, and the conditions. Collective."""
    import samestep

    with samestep.world(device=device) as world:
        ours, theirs = our_steps(network(), world), their_steps(network(), world)
        for steps in (ours, theirs) if ours_first else (theirs, ours):
            next(steps)  # takes its memory now
        blocks = (lambda: advance(ours), lambda: advance(theirs))
        times = alternate(*blocks, pairs=repeats, align=lambda: align(world))
        each = [[seconds / STEPS for seconds in side] for side in times]
        return each[0], each[1], setting(world)


def our_steps(network: nn.Module, world: World) -> Iterator[None]:
    """Trains with samestep, one step for each item."""
    import torch
    from torch.nn import functional as F

    import samestep

    model = samestep.replicate(network.to(world.device), world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    batches = samestep.shards(dataset(), world, batch_size=BATCH_PER_RANK * world.size)
    while True:
        for x, y in batches:
            loss = batches.mean(F.cross_entropy(model(x), y, reduction="none"))
            loss.backward()  # type: ignore[no-untyped-call]
            if batches.step_ends:
                optimizer.step()
                optimizer.zero_grad()
                yield


def their_steps(network: nn.Module, world: World) -> Iterator[None]:
    """Trains with torch alone, one step for each item."""
    import torch
    from torch.nn import functional as F
    from torch.utils.data import DataLoader, DistributedSampler

    model = _wrapped(network.to(world.device), world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    data = dataset()
    sampler: DistributedSampler[Any] = DistributedSampler(data, world.size, world.rank)
    on_cuda = world.device.type == "cuda"
    loader = DataLoader(data, BATCH_PER_RANK, sampler=sampler, pin_memory=on_cuda)
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
    from torch.nn.parallel import DistributedDataParallel

    if world.size == 1:
        return model
    devices = [world.device] if world.device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)


def network() -> nn.Module:
    """Returns the network that is trained, always the same."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers = [layer for widths in itertools.pairwise(WIDTHS) for layer in (nn.Linear(*widths), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def dataset() -> Dataset[tuple[Tensor, ...]]:
    """Returns the data, always the same."""
    import torch
    from torch.utils.data import TensorDataset

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, WIDTHS[0], generator=generator)
    return TensorDataset(x, torch.randint(0, WIDTHS[-1], (SAMPLES,), generator=generator))


def advance(steps: Iterator[None]) -> None:
    """Takes a block of steps."""
    for _ in range(STEPS):
        next(steps)


def align(world: World) -> None:
    """Waits until every rank is here and its device has done all it was given. Collective."""
    import torch

    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    world.barrier()


def setting(world: World) -> dict[str, Any]:
    """Returns the conditions that a report names."""
    import torch

    return {
        "ranks": world.size,
        "device": str(world.device),
        "backend": world.backend,
        "threads_per_rank": torch.get_num_threads(),
        "torch": torch.__version__,
        "parameters": sum(parameter.numel() for parameter in network().parameters()),
        "batch_size": BATCH_PER_RANK * world.size,
        "steps_per_block": STEPS,
    }
