"""How the gradients of the ranks are added: the ways, which of them serves where, and their hooks into DDP.

    "gloo"      DistributedDataParallel's own way, over the world's backend (gloo, nccl, ...)
    "shared"    in shared memory on each host [1], between hosts over the backend [2]; on CPUs
    "ordered"   in the order of the ranks, whatever bucket an element lies in: [1] on one host, else [3]
    None        [1] [2] where they can be had, else "gloo": always the fastest that is right
    a codec     in compressed messages [4], where one is asked for

On CPUs the cores are busy with the backward, so [1] works in the thread that comes by: a bucket that all ranks have
ready is added when the next one is handed in, the rest when the last is. Nobody waits before that.

    backward     bucket 0     bucket 1              bucket 2 (the last)
    rank 0       ready        ready, adds 0         ready, adds 1 and 2, waits until all are done
    rank 1          ready        ready, adds 0 and 1     ready, adds 2, ...

Sources: on buckets and hooks S. Li et al., "PyTorch Distributed", VLDB 2020; on the hierarchy [2] X. Jia et al.,
"Highly Scalable Deep Learning Training System with Mixed-Precision", 2018.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from samestep import progress
from samestep.collectives import shared_memory
from samestep.collectives.board import SharedCounters, has_total_store_order
from samestep.collectives.shared_memory import (
    RegisteredBuffer,
    SharedMemoryAllReduce,
    divide_,
    is_shared,
    must_divide_first,
)
from samestep.errors import UsageError
from samestep.launch.warning import warn
from samestep.replicas.compression import GradientCompression
from samestep.runtime.axes import Axis
from samestep.runtime.neighbours import inter_host_group, open_counters

__all__: list[str] = []

Reduce = Literal["gloo", "shared", "ordered"]
WAYS = ("gloo", "shared", "ordered")


@dataclass(frozen=True)
class Way:
    """How a model's gradients are added.

    Attributes:
        beside: buckets travel beside the backward; else they are added in its thread.
        let_go: tells the other ranks that this one brings no more.
    """

    beside: bool
    let_go: Callable[[], None] = lambda: None


def bring_in(
    model: DistributedDataParallel, axis: Axis, asked: Reduce | None, compression: GradientCompression | None = None
) -> Way:
    """Has a model's gradients added as asked; returns how. Collective: every rank must call it.

    Args:
        model: the engine.
        axis: the ranks.
        asked: the way, or None for the best.
        compression: goes before any other way, or None.

    Raises:
        UsageError: shared memory was asked for and is not available; says why.
    """
    if compression is not None:
        compression.connect(axis)
        register(model, axis, _compressed_by(compression))
        return Way(beside=True)
    why_not = None if asked == "gloo" else _why_not_shared(axis, next(model.parameters()).device)
    one_host = axis.neighbours is not None and axis.neighbours.is_one_host
    if asked == "shared" and why_not is not None:
        raise UsageError(f"reduce='shared' is not available: {why_not}. Leave `reduce` out for what is")
    if asked == "gloo" or (asked is None and why_not is not None):
        return Way(beside=True)
    if asked == "ordered" and (why_not is not None or not one_host):
        return _ordered(model, axis)
    board = open_counters(axis)
    if board is None:
        if asked == "shared":
            raise UsageError("reduce='shared' is not available: the ranks of a host cannot open each other's memory")
        return _ordered(model, axis) if asked == "ordered" else Way(beside=True)
    hook = SharedHook(axis, board, inter_host_group(axis))
    register(model, axis, hook)
    return Way(beside=not one_host, let_go=hook.leave)  # between hosts the backend's messages take the time


def _ordered(model: DistributedDataParallel, axis: Axis) -> Way:
    register(model, axis, add_in_order)
    return Way(beside=False)


def _why_not_shared(axis: Axis, device: torch.device) -> str | None:
    """Why the gradients cannot be added in shared memory; None where they can. The same on all ranks."""
    if device.type != "cpu":
        return f"the gradients are on {device}, which has its own ways"
    if not has_total_store_order():
        return "it needs Linux on x86-64, where processors show their writes in order"
    if axis.neighbours is None or any(len(host) == 1 for host in axis.neighbours.hosts):
        return "a rank stands alone on its host, or cannot see the processes beside it"
    if len({len(host) for host in axis.neighbours.hosts}) > 1:
        return "the hosts have different numbers of ranks"
    return None


Hook = Callable[[Axis, GradBucket], torch.futures.Future[Tensor]]


def register(model: DistributedDataParallel, axis: Axis, hook: Hook) -> None:
    """Has a bucket handed to `hook`, which DDP wants to be a function with these very annotations."""

    def handed(axis, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        if not progress.is_attached():
            return hook(axis, bucket)
        number, buffer = bucket.index(), bucket.buffer()
        dense = buffer if buffer.layout is torch.strided else buffer._values()  # noqa: SLF001
        progress.bucket_filled(number, dense.nbytes, begun=True)
        mean = hook(axis, bucket)
        mean.add_done_callback(lambda _: progress.bucket_reduced(number))
        return mean

    model.register_comm_hook(axis, handed)


class SharedHook:
    """[1] Adds buckets in shared memory, into which it moves them when it first sees them.

    Args:
        axis: the ranks.
        board: of those on this host.
        across: adds a share over the hosts, None on one host.
    """

    def __init__(self, axis: Axis, board: SharedCounters, across: dist.ProcessGroup | None) -> None:
        self._memory = SharedMemoryAllReduce(board, None if across is None else functools.partial(_add_across, across))
        self._board = board
        self._regions: dict[int, RegisteredBuffer | None] = {}
        self._said = axis.rank != 0

    def __call__(self, axis: Axis, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Takes a bucket; the future is done when the last bucket of the backward is."""
        buffer, future = bucket.buffer(), torch.futures.Future[Tensor]()
        region = self._region(bucket.index(), buffer) if buffer.layout is torch.strided else None
        if region is None:
            future = add_by_backend(axis, bucket)
        else:
            self._memory.start(region, divisor=axis.size, then=functools.partial(future.set_result, buffer))
        if bucket.is_last():
            self._memory.finish()
        else:
            self._memory.advance()
        return future

    def _region(self, index: int, buffer: Tensor) -> RegisteredBuffer | None:
        """Where the ranks' buckets of this number lie; DDP builds other buckets after the first step."""
        known = self._regions.get(index)
        if index in self._regions and (known is None or (known.address == buffer.data_ptr() and is_shared(buffer))):
            return known
        self._regions[index] = region = self._memory.register(buffer)
        if region is None and not self._said:
            self._said = True
            warn(_too_small(buffer.nbytes * self._board.size))
        return region

    def leave(self) -> None:
        """Tells the ranks of this host that this one will add nothing more."""
        self._regions.clear()
        self._board.leave()


def _compressed_by(compression: GradientCompression) -> Hook:
    """[4] Averages buckets in compressed messages."""

    def hook(axis: Axis, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        if bucket.buffer().layout is not torch.strided:
            return add_by_backend(axis, bucket)
        return compression.take(axis, bucket)

    return hook


def _too_small(wanted: int) -> str:
    return (
        f"{shared_memory.SHARED_MEMORY} has no room for {math.ceil(wanted / 2**20)} MiB of gradients, which therefore "
        "travel through gloo, several times slower: give the container more, as with docker run --shm-size=2g"
    )


def _add_across(group: dist.ProcessGroup, share: Tensor) -> dist.Work:
    """[2] Begins to add a rank's share to those of the ranks in its place on other hosts."""
    return group.allreduce([share])


def add_by_backend(axis: Axis, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Adds a bucket as DistributedDataParallel does without a hook."""
    buffer = bucket.buffer().div_(axis.size)
    work: Any = dist.all_reduce(buffer, group=axis.group, async_op=True)
    added: torch.futures.Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
    return added


def add_in_order(axis: Axis, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """[3] Adds a bucket in rank order over any backend: a rank gets its share of all, adds it, and hands it round."""
    buffer = bucket.buffer()
    if buffer.layout is not torch.strided:
        return add_by_backend(axis, bucket)
    before, after = (axis.size, 1) if must_divide_first(buffer) else (1, axis.size)
    divide_(buffer, before)
    each = -(-buffer.numel() // axis.size)
    padded = torch.nn.functional.pad(buffer, (0, each * axis.size - buffer.numel()))
    shares = torch.empty_like(padded)
    dist.all_to_all_single(shares, padded, group=axis.group)
    total, *others = shares.view(axis.size, each).unbind()
    for other in others:
        total.add_(other)
    divide_(total, after)
    dist.all_gather(list(padded.view(axis.size, each).unbind()), total, group=axis.group)
    future = torch.futures.Future[Tensor]()
    future.set_result(buffer.copy_(padded[: buffer.numel()]))
    return future
