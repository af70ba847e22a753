"""Gradients of one stage, added up over the replicas of the model, with the backward that ends a step.

    micro-batch of a step     0        1        2, the last
    .grad                     set aside what earlier steps left ─┐
                              g0       g0+g1    g0+g1+g2  ──▶ Σ over replicas ──▶ + what was set aside

Ranks on CPUs of one host add up in shared memory, others over the backend. Copies of one weight in several stages (see
:mod:`samestep.pipelines.ties`) are added up after that.

With a codec the same runs through it (:mod:`samestep.replicas.compression`): it makes means, and N times the mean of N
replicas' gradients is their sum. Which gradients travel together never changes, so neither do the bits.

Between the micro-batches of a step gradients are each replica's own. What earlier steps have left is of all replicas
already: it is set aside, or it would be added up once more. Losses were divided by the weight of the whole step, so
the sum is the gradient, and nothing is scaled.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep.collectives.board import has_total_store_order
from samestep.collectives.shared_memory import RegisteredBuffer, SharedMemoryAllReduce
from samestep.compress.codec import Codec
from samestep.errors import UsageError
from samestep.pipelines.ties import Copies
from samestep.replicas.compression import GradientCompression
from samestep.runtime.hosts import open_counters
from samestep.runtime.world import World
from samestep.seeding import derive_seed

__all__: list[str] = []

BY_ITSELF = (
    "a pipeline adds up its gradients over the replicas by itself: leave samestep.replicate and "
    "DistributedDataParallel out, and make the world with more ranks than stages"
)
BUCKET = 25 << 20  # bytes that travel together, as in DistributedDataParallel


class Reduction:
    """One rank's.

    Args:
        module: whose parameters' gradients are meant.
        world: on whose data axis the replicas stand.
        copies: of weights that several stages share.
        compression: of what the replicas send each other; None without.
    """

    def __init__(
        self, module: nn.Module, world: World, copies: Copies, compression: GradientCompression | None = None
    ) -> None:
        self._copies = copies
        self._compression = compression
        self._parameters = copies.parameters if world.data.size == 1 else list(module.parameters())
        self._world = world
        self._aside: dict[nn.Parameter, Tensor | None] | None = None
        self._step = -1  # in which that was set aside
        self._shared = None if compression is not None else _in_shared_memory(world, module)
        self._buckets: list[_Bucket] = []

    @property
    def is_shared(self) -> bool:
        """Whether replicas add up in shared memory."""
        return self._shared is not None

    def release(self) -> None:
        """Tells the ranks of this host that this one adds up no more, and lets go of the groups."""
        self._buckets.clear()
        if self._compression is not None:
            self._compression.release()
        if self._shared is not None:
            self._shared.board.leave()

    def begin(self) -> None:
        """Before a micro-batch: sets aside what earlier steps have left, if it is the first of its step."""
        state = self._world.step
        goes_on = state.mean is not None and self._step == state.steps  # outside of a loop each call is a step
        if self._aside is not None and goes_on:
            return
        self._aside, self._step = {each: each.grad for each in self._parameters if each.requires_grad}, state.steps
        for parameter in self._aside:
            parameter.grad = None

    def end(self) -> None:
        """After a micro-batch: adds up over the replicas and copies, if it is the last of its step. Collective then."""
        if self._aside is None or not self._world.step.step_ends:
            return
        aside, self._aside = self._aside, None
        for parameter in aside:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if self._world.data.size > 1:
            if self._compression is None:
                self._add_up(aside)
            else:
                self._send(aside, self._compression)
        self._copies.add_up()
        for parameter, earlier in aside.items():
            if earlier is not None:
                parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)

    def _send(self, parameters: Iterable[nn.Parameter], compression: GradientCompression) -> None:
        """Adds up in compressed messages."""
        axis = self._world.data
        owners = {id(each.grad): each for each in parameters if each.grad is not None}
        found = list(buckets(each.grad for each in owners.values() if each.grad is not None))
        sent = []
        for number, alike in enumerate(found, 1):
            flat = torch.cat([each.flatten() for each in alike]).mul_(axis.size)
            parts = flat.split_with_sizes([each.numel() for each in alike])
            gradients = [part.view_as(each) for part, each in zip(parts, alike, strict=True)]
            given = _Given([owners[id(each)] for each in alike], gradients, flat, ends=number == len(found))
            sent.append((compression.reduce_bucket(axis, given), gradients))
        for (future, gradients), alike in zip(sent, found, strict=True):
            future.wait()
            torch._foreach_copy_(alike, gradients)

    def _add_up(self, parameters: Iterable[nn.Parameter]) -> None:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        found = list(buckets(gradients))
        if [bucket.lengths for bucket in self._buckets] != [[each.numel() for each in alike] for alike in found]:
            self._buckets.clear()
            for alike in found:
                flat = torch.empty(sum(each.numel() for each in alike), dtype=alike[0].dtype, device=alike[0].device)
                region = None if self._shared is None else self._shared.register(flat)
                self._buckets.append(_Bucket(flat, [each.numel() for each in alike], region))
        pairs = list(zip(self._buckets, found, strict=True))
        for bucket, alike in pairs:
            torch.cat([each.flatten() for each in alike], out=bucket.flat)
            if self._shared is None or bucket.region is None:
                dist.all_reduce(bucket.flat, group=self._world.data.group)
            else:
                self._shared.start(bucket.region)
                self._shared.advance()
        if self._shared is not None:
            self._shared.finish()
        for bucket, alike in pairs:
            for each, sum_ in zip(alike, bucket.flat.split_with_sizes(bucket.lengths), strict=True):
                each.copy_(sum_.view_as(each))


def compression_of(
    module: nn.Module, world: World, codec: Codec | None, devices: Collection[torch.device]
) -> GradientCompression | None:
    """Returns what compresses gradients on their way to the replicas. Collective over them.

    Raises:
        UsageError: this process computes on several devices, or the codec does not fit a parameter's dtype.
    """
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
    """Gradients that travel together: what they are copied to, how long each is, and where that lies for all."""

    flat: Tensor
    lengths: list[int]
    region: RegisteredBuffer | None


class _Given:
    """Gradients that are handed to a codec together, as DistributedDataParallel hands over its buckets."""

    def __init__(self, owners: list[Tensor], gradients: list[Tensor], flat: Tensor, *, ends: bool) -> None:
        self._owners, self._gradients, self._flat, self._ends = owners, gradients, flat, ends

    def parameters(self) -> list[Tensor]:
        return self._owners

    def gradients(self) -> list[Tensor]:
        return self._gradients

    def buffer(self) -> Tensor:
        return self._flat

    def is_last(self) -> bool:
        return self._ends


def _in_shared_memory(world: World, module: nn.Module) -> SharedMemoryAllReduce | None:
    """Returns what adds up over the replicas, if they are on CPUs of one host. Collective over them."""
    axis = world.data
    one_host = axis.host_map is not None and axis.host_map.is_one_host
    on_cpu = all(each.device.type == "cpu" for each in module.parameters()) and world.device.type == "cpu"
    if axis.size == 1 or not on_cpu or not one_host or not has_total_store_order():
        return None
    board = open_counters(axis)
    return None if board is None else SharedMemoryAllReduce(board)


def buckets(gradients: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yields gradients that travel together: of one type and device, and no more than a bucket's bytes if several.

    >>> [len(bucket) for bucket in buckets([torch.zeros(2), torch.zeros(3), torch.zeros(1, dtype=torch.float64)])]
    [2, 1]
    """
    alike: defaultdict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
    for each in gradients:
        alike[each.dtype, each.device].append(each)
    for tensors in alike.values():
        bucket: list[Tensor] = []
        for each in tensors:
            if bucket and sum(one.nbytes for one in bucket) + each.nbytes > BUCKET:
                yield bucket
                bucket = []
            bucket.append(each)
        yield bucket
