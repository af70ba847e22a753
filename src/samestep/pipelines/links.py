"""What lies between a rank of a pipeline and the next, measured: how long messages take, small ones and large ones.

    rank 0   ──▶ small ──▶   rank 1        half of a round trip: handling twice, and latency
    rank 0   ◀── small ◀──   rank 1
    rank 0   ◀─▶ large ◀─▶   rank 1        what it takes more, by its bytes, the quickest of each: bandwidth
    rank 0   send · send · send            how long the caller is kept: handling
    rank 1        · recv · recv · recv     likewise, of what has come before

Between the rounds both compute, as ranks of a pipeline do between their messages: whoever waits for one has to be
woken, and what a message needs, code and memory, is no longer in the caches.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.pipelines.layers import Link
from samestep.pipelines.messages import Messages
from samestep.pipelines.shelves import Shelf, shelves
from samestep.runtime.axis import Axis
from samestep.runtime.exchange import all_gather_json
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
    between = shelves(axis, world.device)
    mine, handling = [[0.0, 0.0]], _handling(world, between)
    for shelf in between.values():
        shelf.begin(2 * (WARM_UP + ROUNDS), 2 * (WARM_UP + ROUNDS))
    for place in range(axis.size - 1):
        if axis.rank in {place, place + 1}:
            leads = axis.rank == place
            other = place + 1 if leads else place
            tensors = (torch.zeros(size, dtype=torch.uint8, device=world.device) for size in (4, LARGE))
            small, large = (_trip(each, world, other, between.get(other), leads=leads) for each in tensors)
            if leads:
                mine.append([median(small), max(0.0, min(large) - min(small))])
    told = [pair for pairs in all_gather_json(world.everyone, mine) for pair in pairs]
    for shelf in between.values():
        shelf.leave()
    trip, more = max(pair[0] for pair in told), max(pair[1] for pair in told)
    bandwidth = LARGE / more if more else math.inf
    return Link(max(0.0, trip - 2 * handling), bandwidth, handling=handling)


def _handling(world: World, between: Mapping[int, Shelf]) -> float:
    """Returns the seconds that a rank is kept by a message, the mean of sending and taking. Collective."""
    axis, rounds = world.pipeline, WARM_UP + ROUNDS
    if axis.size == 1:
        return 0.0
    messages, stage = Messages(forward_only(axis.size, rounds), axis, world.device, between), axis.rank
    messages.begin([None] * rounds)
    sent, taken = [0.0], [0.0]
    tensors = [torch.zeros(4, device=world.device)]
    world.barrier()
    for _ in range(stage):  # one round behind the rank before, whose messages have come
        _compute(world.device)
    for number in range(rounds):
        _compute(world.device)
        if stage:
            taken.append(_seconds(partial(messages.receive, Action("F", stage - 1, number))))
        if stage + 1 < axis.size:
            sent.append(_seconds(partial(messages.send, Action("F", stage, number), tensors)))
    messages.end()
    mine = [median(each[1 + WARM_UP :] or [0.0]) for each in (sent, taken)]
    sending, taking = (max(each) for each in zip(*all_gather_json(world.everyone, mine), strict=True))
    return float(sending + taking) / 2


def _compute(device: torch.device) -> None:
    """Works for a while on what fills the caches; beside a GPU the host waits."""
    if device.type != "cpu":
        threading.Event().wait(_PAUSE)
        return
    until = time.perf_counter() + _PAUSE
    one = torch.ones(512, 512)  # 1 MiB
    while time.perf_counter() < until:
        one = torch.mm(one, one).clamp_(0, 1)


def _seconds(act: Callable[[], object]) -> float:
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin


def _trip(tensor: Tensor, world: World, other: int, shelf: Shelf | None, *, leads: bool) -> list[float]:
    """Returns the seconds of one way of each round trip."""
    send, receive = _over(tensor, world.pipeline, other) if shelf is None else _through(tensor, shelf)
    seconds = []
    for _ in range(WARM_UP + ROUNDS):
        _compute(tensor.device)
        begin = time.perf_counter()
        if leads:
            send()
        receive()
        if not leads:
            send()
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)
        seconds.append((time.perf_counter() - begin) / 2)
    return seconds[WARM_UP:]


def _over(tensor: Tensor, axis: Axis, other: int) -> tuple[Callable[[], object], Callable[[], object]]:
    rank, group = axis.ranks[other], axis.group
    return partial(dist.send, tensor, rank, group=group), partial(dist.recv, tensor, rank, group=group)


def _through(tensor: Tensor, shelf: Shelf) -> tuple[Callable[[], object], Callable[[], object]]:
    def receive() -> None:
        message = shelf.take()
        message.read(tensor.dtype, tensor.shape)
        message.done()

    return partial(shelf.lay, [tensor]), receive
