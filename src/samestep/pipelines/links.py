"""What lies between a rank of a pipeline and the next, measured: how long messages take, small ones and large ones.

    rank 0   ──▶ small ──▶   rank 1        half of a round trip: latency
    rank 0   ◀── small ◀──   rank 1
    rank 0   ◀─▶ large ◀─▶   rank 1        what is left of it, by its bytes: bandwidth

Between the rounds both pause, since ranks of a pipeline compute between their messages, and whoever waits for one has
to be woken.
"""

from __future__ import annotations

import threading
import time
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.pipelines.layers import Link
from samestep.runtime.exchange import gather_json
from samestep.runtime.world import World

__all__: list[str] = []

ROUNDS, WARM_UP = 15, 3
LARGE = 4 << 20  # bytes
_PAUSE = 0.005  # seconds


def measure_link(world: World) -> Link:
    """Returns the slowest link of the pipelines of a world, the same on all ranks; no time with a single stage.

    Collective: every rank of the world must call it.

    Example:
        >>> import samestep
        >>> with samestep.world(pipeline=1) as world:
        ...     measure_link(world)
        Link(latency=0.0, bandwidth=inf, beside=True)
    """
    axis = world.pipeline
    mine = [[0.0, 0.0]]
    for place in range(axis.size - 1):
        if axis.rank in {place, place + 1}:
            other = axis.ranks[place + 1 if axis.rank == place else place]
            small, large = (
                _trip(
                    torch.zeros(size, dtype=torch.uint8, device=world.device),
                    other,
                    leads=axis.rank == place,
                    world=world,
                )
                for size in (4, LARGE)
            )
            mine.append([small, max(0.0, large - small)])
    told = [pair for pairs in gather_json(world.everyone, mine) for pair in pairs]
    latency, more = max(pair[0] for pair in told), max(pair[1] for pair in told)
    return Link(latency, LARGE / more) if more else Link(latency)


def _trip(tensor: Tensor, other: int, *, leads: bool, world: World) -> float:
    """Returns the median seconds of one way of a round trip."""
    group, seconds = world.pipeline.group, []
    for _ in range(WARM_UP + ROUNDS):
        threading.Event().wait(_PAUSE)
        begin = time.perf_counter()
        if leads:
            dist.send(tensor, other, group=group)
        dist.recv(tensor, other, group=group)
        if not leads:
            dist.send(tensor, other, group=group)
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)
        seconds.append((time.perf_counter() - begin) / 2)
    return median(seconds[WARM_UP:]) if leads else 0.0
