"""What lies between a rank of a pipeline and the next, measured: how long messages take, small ones and large ones.

    rank 0   ──▶ small ──▶   rank 1        half of a round trip: handling twice, and latency
    rank 0   ◀── small ◀──   rank 1
    rank 0   ◀─▶ large ◀─▶   rank 1        what is left of it, by its bytes: bandwidth
    rank 0   send · send · send            how long the caller is kept: handling
    rank 1        · recv · recv · recv     likewise, of what has come before

Between the rounds both pause, since ranks of a pipeline compute between their messages, and whoever waits for one has
to be woken.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.pipelines.layers import Link
from samestep.pipelines.messages import Messages
from samestep.runtime.exchange import gather_json
from samestep.runtime.world import World
from samestep.schedule.forward_only import forward_only
from samestep.schedule.plan import Action

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
        Link(latency=0.0, bandwidth=inf, beside=True, handling=0.0)
    """
    axis = world.pipeline
    mine, handling = [[0.0, 0.0]], _handling(world)
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
    trip, more = max(pair[0] for pair in told), max(pair[1] for pair in told)
    bandwidth = LARGE / more if more else math.inf
    return Link(max(0.0, trip - 2 * handling), bandwidth, handling=handling)


def _handling(world: World) -> float:
    """Returns the seconds that a rank is kept by a message, the mean of sending and taking. Collective."""
    axis, rounds = world.pipeline, WARM_UP + ROUNDS
    if axis.size == 1:
        return 0.0
    messages, stage = Messages(forward_only(axis.size, rounds), axis, world.device), axis.rank
    messages.begin([None] * rounds)
    sent, taken = [0.0], [0.0]
    tensors = [torch.zeros(4, device=world.device)]
    world.barrier()
    threading.Event().wait(_PAUSE * stage)  # one round behind the rank before, whose messages have come
    for number in range(rounds):
        threading.Event().wait(_PAUSE)
        if stage:
            taken.append(_seconds(partial(messages.receive, Action("F", stage - 1, number))))
        if stage + 1 < axis.size:
            sent.append(_seconds(partial(messages.send, Action("F", stage, number), tensors)))
    messages.end()
    mine = [median(each[1 + WARM_UP :] or [0.0]) for each in (sent, taken)]
    sending, taking = (max(each) for each in zip(*gather_json(world.everyone, mine), strict=True))
    return float(sending + taking) / 2


def _seconds(act: Callable[[], object]) -> float:
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin


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
