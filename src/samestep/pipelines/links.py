"""The links between the ranks of a pipeline, measured: how long messages take, small ones and large ones.

A small message and a large one go there and back, over the channels of a step. Beside that each rank measures how long
a message keeps it from its work: ranks that compute find less of it in their caches than ranks that wait do, so there
is some work before each message.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median

import torch

from samestep.pipelines.layers import Link
from samestep.pipelines.tensor_meta import TensorMeta
from samestep.pipelines.transport import Channel, RankTransport, open_channels
from samestep.runtime.exchange import all_gather_json
from samestep.runtime.world import World
from samestep.schedule.algorithms import forward_only
from samestep.schedule.schedule import Action

ROUNDS, WARM_UP = 15, 3
LARGE = 4 << 20  # bytes
_WORK_S = 0.005


def measure_link(world: World) -> Link:
    """Returns the slowest link of the pipelines of a world, the same on all ranks; no time with a single stage.

    Collective: every rank of the world must call it.

    Example:
        >>> import samestep
        >>> with samestep.world(pipeline=1) as world:
        ...     measure_link(world)
        Link(latency=0.0, bandwidth=inf, overlap=True, overhead=0.0)
    """
    axis = world.pipeline
    channels = open_channels(axis, world.device)
    own, overhead = [[0.0, 0.0]], _measure_overhead(world, channels)
    for channel in channels.values():
        channel.begin_step(2 * (WARM_UP + ROUNDS), 2 * (WARM_UP + ROUNDS))
    for place in range(axis.size - 1):
        if axis.rank in {place, place + 1}:
            leads = axis.rank == place
            channel = channels[place + 1 if leads else place]
            small, large = (_one_way_s(channel, size, world.device, leads=leads) for size in (4, LARGE))
            if leads:
                own.append([median(small), max(0.0, min(large) - min(small))])
    everyone = [pair for pairs in all_gather_json(world.everyone, own) for pair in pairs]
    for channel in channels.values():
        channel.close()
    small_s, more_s = (max(each) for each in zip(*everyone, strict=True))
    return Link(max(0.0, small_s - 2 * overhead), LARGE / more_s if more_s else math.inf, overhead=overhead)


def _measure_overhead(world: World, channels: Mapping[int, Channel]) -> float:
    """Returns the seconds that a message keeps a rank, the mean of sending and receiving. Collective."""
    axis, rounds = world.pipeline, WARM_UP + ROUNDS
    if axis.size == 1:
        return 0.0
    transport, stage = RankTransport(forward_only(axis.size, rounds), axis, channels), axis.rank
    transport.begin_step([None] * rounds)
    sent, received = [0.0], [0.0]
    tensors = [torch.zeros(4, device=world.device)]
    world.barrier()
    for _ in range(stage):  # one round behind the rank before, so that its messages are there
        _work(world.device)
    for number in range(rounds):
        _work(world.device)
        if stage:
            received.append(_seconds(partial(transport.receive, Action("F", stage - 1, number))))
        if stage + 1 < axis.size:
            sent.append(_seconds(partial(transport.send, Action("F", stage, number), tensors)))
    transport.end_step()
    own = [median(each[1 + WARM_UP :] or [0.0]) for each in (sent, received)]
    sending, receiving = (max(each) for each in zip(*all_gather_json(world.everyone, own), strict=True))
    return float(sending + receiving) / 2


def _work(device: torch.device) -> None:
    """Works for a while on what fills the caches; beside a GPU the host waits."""
    if device.type != "cpu":
        threading.Event().wait(_WORK_S)
        return
    until = time.perf_counter() + _WORK_S
    one = torch.ones(512, 512)  # 1 MiB
    while time.perf_counter() < until:
        one = torch.mm(one, one).clamp_(0, 1)


def _seconds(act: Callable[[], object]) -> float:
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin


def _one_way_s(channel: Channel, size: int, device: torch.device, *, leads: bool) -> list[float]:
    """Returns half of the seconds of each round trip."""
    tensor = torch.zeros(size, dtype=torch.uint8, device=device)
    metas = (TensorMeta.of(tensor),)
    seconds = []
    for _ in range(WARM_UP + ROUNDS):
        _work(device)
        begin = time.perf_counter()
        if leads:
            channel.send([tensor])
        channel.receive(metas)
        if not leads:
            channel.send([tensor])
        if tensor.is_cuda:
            torch.cuda.synchronize(device)
        seconds.append((time.perf_counter() - begin) / 2)
    channel.end_step()
    return seconds[WARM_UP:]
