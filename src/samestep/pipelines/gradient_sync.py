"""Gradients of a stage, summed over the replicas of the model with the backward that ends a step.

    micro-batch of a step     0        1        2, the last
    .grad                     carried: what earlier steps left ──┐
                              g0       g0+g1    g0+g1+g2  ──▶ Σ over replicas ──▶ + what was carried

Ranks on CPUs of one host sum in shared memory, others over the backend. Copies of one weight in several stages (see
:mod:`samestep.pipelines.tied_weights`) are summed after that.

With a codec the gradients go through :mod:`samestep.replicas.compression`: it makes means, and N times the mean of N
replicas' gradients is their sum. Which gradients travel together never changes, so neither do the bits.

Between the micro-batches of a step gradients are each replica's own. What earlier steps have left is the sum of all
replicas already: it is carried beside, or it would be summed once more. Losses were divided by the weight of the whole
step, so the sum is the gradient, and nothing is scaled.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep.collectives.counters import has_total_store_order
from samestep.collectives.shared_memory import RegisteredBuffer, SharedMemoryAllReduce
from samestep.compress.codecs import Codec
from samestep.errors import UsageError
from samestep.pipelines.tied_weights import TiedGradients
from samestep.replicas.compression import GradientCompression
from samestep.runtime.hosts import open_counters
from samestep.runtime.world import World
from samestep.seeding import derive_seed

BUCKET_BYTES = 25 << 20  # that travel together, as in DistributedDataParallel


class ReplicaGradientSync:
    def __init__(
        self, module: nn.Module, world: World, tied: TiedGradients, compression: GradientCompression | None = None
    ) -> None:
        self._tied = tied
        self._compression = compression
        self._parameters = tied.parameters if world.data.size == 1 else list(module.parameters())
        self._world = world
        self._carried: dict[nn.Parameter, Tensor | None] | None = None
        self._step = -1  # that the carried gradients are from before
        self._shared_memory = None if compression is not None else _open_shared_memory(world, module)
        self._buckets: list[_Bucket] = []

    def release(self) -> None:
        """Tells the ranks of this host that this one sums no more, and closes the groups."""
        self._buckets.clear()
        if self._compression is not None:
            self._compression.release()
        if self._shared_memory is not None:
            self._shared_memory.counters.close()

    def begin(self) -> None:
        """Before a micro-batch: carries what earlier steps have left, if it is the first of its step."""
        state = self._world.step
        continues = state.mean is not None and self._step == state.steps  # outside of a loop each call is a step
        if self._carried is not None and continues:
            return
        self._carried, self._step = {each: each.grad for each in self._parameters if each.requires_grad}, state.steps
        for parameter in self._carried:
            parameter.grad = None

    def end(self) -> None:
        """After a micro-batch: sums over replicas and copies, if it is the last of its step. Collective then."""
        if self._carried is None or not self._world.step.step_ends:
            return
        carried, self._carried = self._carried, None
        for parameter in carried:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if self._world.data.size > 1:
            if self._compression is None:
                self._sum(carried)
            else:
                self._sum_compressed(carried, self._compression)
        self._tied.sum_gradients()
        for parameter, earlier in carried.items():
            if earlier is not None:
                parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)

    def _sum_compressed(self, parameters: Iterable[nn.Parameter], compression: GradientCompression) -> None:
        axis = self._world.data
        owners = [each for each in parameters if each.grad is not None]
        buckets = assign_buckets([each.grad for each in owners if each.grad is not None])
        pending = []
        for number, places in enumerate(buckets, 1):
            own = [owners[place] for place in places]
            gradients = [each.grad for each in own if each.grad is not None]
            flat = torch.cat([each.flatten() for each in gradients]).mul_(axis.size)
            parts = flat.split_with_sizes([each.numel() for each in gradients])
            views = [part.view_as(each) for part, each in zip(parts, gradients, strict=True)]
            bucket = _CompressionBucket(list(own), views, flat, number == len(buckets))
            pending.append((compression.reduce_bucket(axis, bucket), gradients, views))
        for future, gradients, views in pending:
            future.wait()
            torch._foreach_copy_(gradients, views)

    def _sum(self, parameters: Iterable[nn.Parameter]) -> None:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        grouped = [[gradients[place] for place in places] for places in assign_buckets(gradients)]
        lengths = [[each.numel() for each in group] for group in grouped]
        if [bucket.lengths for bucket in self._buckets] != lengths:
            self._buckets = []
            for own, group in zip(lengths, grouped, strict=True):
                flat = torch.empty(sum(own), dtype=group[0].dtype, device=group[0].device)
                registered = None if self._shared_memory is None else self._shared_memory.register(flat)
                self._buckets.append(_Bucket(flat, own, registered))
        for bucket, group in zip(self._buckets, grouped, strict=True):
            torch.cat([each.flatten() for each in group], out=bucket.flat)
            if self._shared_memory is None or bucket.registered is None:
                dist.all_reduce(bucket.flat, group=self._world.data.group)
            else:
                self._shared_memory.start(bucket.registered)
                self._shared_memory.poll()
        if self._shared_memory is not None:
            self._shared_memory.wait_all()
        for bucket, group in zip(self._buckets, grouped, strict=True):
            for each, total in zip(group, bucket.flat.split_with_sizes(bucket.lengths), strict=True):
                each.copy_(total.view_as(each))


def make_compression(
    module: nn.Module, world: World, codec: Codec | None, devices: Collection[torch.device]
) -> GradientCompression | None:
    """Returns what compresses gradients between replicas. Collective over them."""
    if codec is None or world.data.size == 1:
        return None
    if len(set(devices)) > 1:
        raise UsageError(
            f"compress={codec.name} is for gradients of one device, and this process computes on several: leave either "
            "it or devices= out"
        )
    seed = derive_seed(world.seed or 0, "compression", world.pipeline.rank)
    compression = GradientCompression(module, codec, seed)
    compression.connect(world.data)
    return compression


@dataclass
class _Bucket:
    """Gradients that travel together: the memory they are copied to, the length of each, and where all ranks see it."""

    flat: Tensor
    lengths: list[int]
    registered: RegisteredBuffer | None


@dataclass(frozen=True)
class _CompressionBucket:
    """Gradients that are given to a codec together, as DistributedDataParallel gives its buckets."""

    owners: list[Tensor]
    views: list[Tensor]
    flat: Tensor
    last: bool

    def parameters(self) -> list[Tensor]:
        return self.owners

    def gradients(self) -> list[Tensor]:
        return self.views

    def buffer(self) -> Tensor:
        return self.flat

    def is_last(self) -> bool:
        return self.last


def _open_shared_memory(world: World, module: nn.Module) -> SharedMemoryAllReduce | None:
    """Returns what sums over the replicas, if they are on CPUs of one host. Collective over them."""
    axis = world.data
    one_host = axis.host_map is not None and axis.host_map.is_one_host
    on_cpu = all(each.device.type == "cpu" for each in module.parameters()) and world.device.type == "cpu"
    if axis.size == 1 or not on_cpu or not one_host or not has_total_store_order():
        return None
    counters = open_counters(axis)
    return None if counters is None else SharedMemoryAllReduce(counters)


def assign_buckets(gradients: list[Tensor]) -> list[list[int]]:
    """Returns which gradients travel together: of one dtype and device, in DistributedDataParallel's buckets.

    >>> assign_buckets([torch.zeros(2), torch.zeros(3), torch.zeros(1, dtype=torch.float64)])
    [[0, 1], [2]]
    """
    if not gradients:
        return []
    assign: Any = dist._compute_bucket_assignment_by_size  # type: ignore[attr-defined]  # noqa: SLF001
    places: list[list[int]] = assign(gradients, [BUCKET_BYTES])[0]
    return places
