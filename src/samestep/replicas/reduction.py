"""How the gradients of the ranks are added: the methods, which of them serves where, and their hooks into DDP.

    "gloo"      DistributedDataParallel's own way, over the world's backend (gloo, nccl, ...)
    "shared"    in shared memory on each host, between hosts over the backend; on CPUs
    "ordered"   in the order of the ranks, whatever bucket an element lies in: in shared memory on one host, else
                by messages
    None        like "shared" where that is available, else "gloo": always the fastest that is right
    a codec     in compressed messages

On CPUs the cores are busy with the backward, so shared memory is added in the thread that comes by: a bucket that all
ranks have ready is added when the next one is handed in, the rest when the last is. No rank waits before that.

Sources: on buckets and hooks S. Li et al., "PyTorch Distributed", VLDB 2020; on the hierarchy of hosts X. Jia et al.,
"Highly Scalable Deep Learning Training System with Mixed-Precision", 2018.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from samestep import progress
from samestep.collectives import shared_memory
from samestep.collectives.counters import SharedCounters, has_total_store_order
from samestep.collectives.shared_memory import (
    RegisteredBuffer,
    SharedMemoryAllReduce,
    divide_,
    is_shared,
    must_divide_first,
)
from samestep.errors import UsageError
from samestep.launch.rank.user_code import warn
from samestep.replicas.compression import GradientCompression
from samestep.runtime.axis import Axis
from samestep.runtime.hosts import inter_host_group, open_counters

Reduce = Literal["gloo", "shared", "ordered"]
METHODS = ("gloo", "shared", "ordered")
Hook = Callable[[Axis, GradBucket], torch.futures.Future[Tensor]]


@dataclass(frozen=True)
class Reduction:
    overlaps_backward: bool  # buckets are sent beside the backward; else they are added in its thread
    release: Callable[[], None] = lambda: None  # tells the other ranks that this one adds nothing more


def install(
    model: DistributedDataParallel, axis: Axis, method: Reduce | None, compression: GradientCompression | None = None
) -> Reduction:
    """Makes DDP add a model's gradients by a method, or compressed; None is the best. Collective: every rank calls it.

    Raises:
        UsageError: shared memory was asked for and is not available; says why.
    """
    if compression is not None:
        compression.connect(axis)
        register(model, axis, _compressed_by(compression))
        return Reduction(overlaps_backward=True)
    obstacle = None if method == "gloo" else _why_not_shared(axis, next(model.parameters()).device)
    one_host = axis.host_map is not None and axis.host_map.is_one_host
    if method == "shared" and obstacle is not None:
        raise UsageError(f"reduce='shared' is not available: {obstacle}. Leave `reduce` out for what is")
    if method == "gloo" or (method is None and obstacle is not None):
        return Reduction(overlaps_backward=True)
    counters = None
    if method != "ordered" or (obstacle is None and one_host):
        counters = open_counters(axis)
        if counters is None and method == "shared":
            raise UsageError("reduce='shared' is not available: the ranks of a host cannot open each other's memory")
        if counters is None and method is None:
            return Reduction(overlaps_backward=True)
    if counters is None:
        register(model, axis, ordered_allreduce_bucket)
        return Reduction(overlaps_backward=False)
    hook = SharedMemoryHook(axis, counters, inter_host_group(axis))
    register(model, axis, hook)
    return Reduction(overlaps_backward=not one_host, release=hook.leave)  # between hosts messages take the time


def _why_not_shared(axis: Axis, device: torch.device) -> str | None:
    """Why the gradients cannot be added in shared memory; None where they can. The same on all ranks."""
    if device.type != "cpu":
        return f"the gradients are on {device}, which has its own ways"
    if not has_total_store_order():
        return "it needs Linux on x86-64, where processors show their writes in order"
    if axis.host_map is None or any(len(host) == 1 for host in axis.host_map.hosts):
        return "a rank stands alone on its host, or cannot see the processes beside it"
    if len({len(host) for host in axis.host_map.hosts}) > 1:
        return "the hosts have different numbers of ranks"
    return None


def register(model: DistributedDataParallel, axis: Axis, hook: Hook) -> None:
    """Passes buckets to `hook`, in a function with the very annotations that DDP wants."""

    def reduce_bucket(axis, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        if not progress.is_attached():
            return hook(axis, bucket)
        number, buffer = bucket.index(), bucket.buffer()
        dense = buffer if buffer.layout is torch.strided else buffer._values()  # noqa: SLF001
        progress.bucket_filled(number, dense.nbytes, begun=True)
        mean = hook(axis, bucket)
        mean.add_done_callback(lambda _: progress.bucket_reduced(number))
        return mean

    model.register_comm_hook(axis, reduce_bucket)


class SharedMemoryHook:
    """Adds buckets in shared memory, into which it moves them when it first sees them.

    `counters` are those of this host's ranks; `between` adds a share over the hosts, None on one host.
    """

    def __init__(self, axis: Axis, counters: SharedCounters, between: dist.ProcessGroup | None) -> None:
        add = None if between is None else lambda share: between.allreduce([share])
        self._memory = SharedMemoryAllReduce(counters, add)
        self._counters = counters
        self._regions: dict[int, RegisteredBuffer | None] = {}
        self._warned = axis.rank != 0

    def __call__(self, axis: Axis, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Reduces a bucket; the future is done when the last bucket of the backward is."""
        buffer, future = bucket.buffer(), torch.futures.Future[Tensor]()
        region = self._region(bucket.index(), buffer) if buffer.layout is torch.strided else None
        if region is None:
            future = allreduce_bucket(axis, bucket)
        else:
            self._memory.start(region, divisor=axis.size, callback=functools.partial(future.set_result, buffer))
        if bucket.is_last():
            self._memory.wait_all()
        else:
            self._memory.poll()
        return future

    def _region(self, index: int, buffer: Tensor) -> RegisteredBuffer | None:
        """Where the ranks' buckets of this number lie; DDP builds other buckets after the first step."""
        known = self._regions.get(index)
        if index in self._regions and (known is None or (known.address == buffer.data_ptr() and is_shared(buffer))):
            return known
        self._regions[index] = region = self._memory.register(buffer)
        if region is None and not self._warned:
            self._warned = True
            wanted = math.ceil(buffer.nbytes * self._counters.size / 2**20)
            warn(
                f"{shared_memory.SHARED_MEMORY} has no room for {wanted} MiB of gradients, which therefore travel "
                "through gloo, several times slower: give the container more, as with docker run --shm-size=2g"
            )
        return region

    def leave(self) -> None:
        self._regions.clear()
        self._counters.close()


def _compressed_by(compression: GradientCompression) -> Hook:
    def hook(axis: Axis, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        if bucket.buffer().layout is not torch.strided:
            return allreduce_bucket(axis, bucket)
        return compression.reduce_bucket(axis, bucket)

    return hook


def allreduce_bucket(axis: Axis, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Averages a bucket as DistributedDataParallel does without a hook."""
    buffer = bucket.buffer().div_(axis.size)
    work: Any = dist.all_reduce(buffer, group=axis.group, async_op=True)
    averaged: torch.futures.Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
    return averaged


def ordered_allreduce_bucket(axis: Axis, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Averages a bucket in rank order over any backend."""
    buffer = bucket.buffer()
    if buffer.layout is not torch.strided:
        return allreduce_bucket(axis, bucket)
    before, after = (axis.size, 1) if must_divide_first(buffer) else (1, axis.size)
    divide_(buffer, before)

    def add(shares: Sequence[Tensor]) -> Tensor:
        total, *others = shares
        for other in others:
            total.add_(other)
        divide_(total, after)
        return total

    future = torch.futures.Future[Tensor]()
    future.set_result(buffer.copy_(ordered_sum(axis, buffer, add)))
    return future


def ordered_sum(axis: Axis, flat: Tensor, add: Callable[[Sequence[Tensor]], Tensor]) -> Tensor:
    """Returns the sum of the ranks' `flat`, 1-dim, the same bits on all. Collective: every rank must call it.

    Every rank gets its share of all, adds it by `add`, which is given the shares in rank order, and sends it to all.
    """
    each = -(-flat.numel() // axis.size)
    padded = torch.nn.functional.pad(flat, (0, each * axis.size - flat.numel()))
    shares = torch.empty_like(padded)
    dist.all_to_all_single(shares, padded, group=axis.group)
    mine = add(shares.view(axis.size, each).unbind())
    dist.all_gather(list(padded.view(axis.size, each).unbind()), mine, group=axis.group)
    return padded[: flat.numel()]
