"""Gradients as flat memory, added slice by slice and rank by rank along one binary tree.

`.grad` accumulates from left to right, and DistributedDataParallel adds in the order of the ranks in gloo's or NCCL's
ring; both depend on the number of ranks. Here a slice's gradients are taken off `.grad` and added where they belong in
((g0 + g1) + (g2 + g3)), a node as soon as both its halves are there, so log2(slices) + 1 nodes at most. Then the ranks
add their nodes by the same tree: in shared memory on one host; else every rank gets its 1/N of all nodes, adds them and
sends the sum to all, 2 (N-1)/N of the gradient's bytes, as in a ring.

A flat part holds the gradients of one dtype, each from a multiple of 512 bytes on, and behind them in how many slices
each parameter had one: a parameter that none of them used keeps none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep.collectives.counters import has_total_store_order
from samestep.collectives.shared_memory import RegisteredBuffer, SharedMemoryAllReduce, is_shared
from samestep.errors import ModelError
from samestep.runtime.axis import Axis
from samestep.runtime.hosts import open_counters
from samestep.topology import tree_sum

ALIGNED = 128  # elements: as the allocators of CPU and GPU place a tensor, so that kernels take the same path

FlatBuffers = list[Tensor]  # the flat parts, in the order of the layout's


@dataclass
class _Part:
    dtype: torch.dtype
    device: torch.device
    parameters: list[nn.Parameter] = field(default_factory=list)
    begins: list[int] = field(default_factory=list)
    end: int = 0

    def add(self, parameter: nn.Parameter) -> None:
        self.parameters.append(parameter)
        self.begins.append(self.end)
        self.end += -(-parameter.numel() // ALIGNED) * ALIGNED

    def views(self, flat: Tensor) -> list[Tensor]:
        return [
            flat[begin : begin + parameter.numel()].as_strided(
                parameter.shape, _strides(parameter), flat.storage_offset() + begin
            )
            for parameter, begin in zip(self.parameters, self.begins, strict=True)
        ]


def _strides(parameter: Tensor) -> Sequence[int]:
    """Autograd lays a gradient out like its parameter wherever that leaves no holes."""
    dense = torch.empty_like(parameter, device="meta")  # keeps the strides of what is dense, else makes it so
    return dense.stride()


class FlatLayout:
    """Where the gradients of some parameters lie in flat memory."""

    def __init__(self, parameters: Sequence[nn.Parameter], slices: int) -> None:
        self.parameters = list(parameters)
        parts: dict[tuple[torch.dtype, torch.device], _Part] = {}
        for parameter in self.parameters:
            key = (parameter.dtype, parameter.device)
            parts.setdefault(key, _Part(*key)).add(parameter)
        self._parts = list(parts.values())
        self._multiple = slices * ALIGNED
        self._free: list[FlatBuffers] = []  # memory that was touched before costs no page faults: 4 ms less for 20 MB

    def copy(self) -> FlatBuffers:
        """Returns this slice's gradients, copied; `.grad` stays."""
        node = self.memory()
        for part, flat in zip(self._parts, node, strict=True):
            pairs = []
            for view, parameter in zip(part.views(flat), part.parameters, strict=True):
                if parameter.grad is None:
                    view.zero_()
                else:
                    pairs.append((view, parameter.grad))
            if any(gradient.layout is not torch.strided for _, gradient in pairs):
                raise ModelError("virtual ranks add dense gradients only: use nn.Embedding(..., sparse=False)")
            if pairs:
                torch._foreach_copy_([view for view, _ in pairs], [gradient for _, gradient in pairs])
            has = [parameter.grad is not None for parameter in part.parameters]
            flat[part.end : part.end + len(has)] = torch.tensor(has, dtype=part.dtype)
        return node

    def memory(self) -> FlatBuffers:
        """Returns memory for a node; the gaps between the gradients are zero, and stay so."""
        if self._free:
            return self._free.pop()
        return [
            torch.zeros(
                -(-(part.end + len(part.parameters)) // self._multiple) * self._multiple,
                dtype=part.dtype,
                device=part.device,
            )
            for part in self._parts
        ]

    def free(self, nodes: Iterable[FlatBuffers]) -> None:
        """Takes memory back that nobody reads any more."""
        self._free += nodes

    def assign(self, node: FlatBuffers) -> None:
        """Makes `node` the gradients; a parameter that had none in any slice gets none."""
        for part, flat in zip(self._parts, node, strict=True):
            counts = flat[part.end : part.end + len(part.parameters)].tolist()
            for parameter, view, count in zip(part.parameters, part.views(flat), counts, strict=True):
                parameter.grad = view if count else None


class TreeAccumulator:
    """The nodes of one rank's part of the tree, from its slices one after another."""

    def __init__(self, layout: FlatLayout) -> None:
        self._layout = layout
        self._nodes: list[tuple[int, FlatBuffers]] = []  # how many slices are in each, largest first

    def push(self, node: FlatBuffers) -> None:
        slices = 1
        while self._nodes and self._nodes[-1][0] == slices:
            _, earlier = self._nodes.pop()
            torch._foreach_add_(node, earlier)
            self._layout.free([earlier])
            slices *= 2
        self._nodes.append((slices, node))

    def with_last(self, node: FlatBuffers) -> FlatBuffers:
        """Returns the sum of all slices, when `node` is the last's; what was pushed stays."""
        for _, earlier in reversed(self._nodes):
            torch._foreach_add_(node, earlier)
        return node

    def reset(self) -> None:
        self._layout.free(node for _, node in self._nodes)
        self._nodes.clear()


class TreeAllReduce:
    """Adds nodes over the ranks of an axis: in shared memory where all are on one host, else by messages."""

    def __init__(self, axis: Axis, device: torch.device) -> None:
        self._axis = axis
        one_host = axis.host_map is not None and axis.host_map.is_one_host
        counters = open_counters(axis) if one_host and device.type == "cpu" and has_total_store_order() else None
        self._shared = None if counters is None else SharedMemoryAllReduce(counters)
        self._regions: dict[int, RegisteredBuffer | None] = {}

    def sum(self, node: FlatBuffers, layout: FlatLayout) -> None:
        """Makes `node` the sum of all ranks' by the tree, in place: the same bits on all. Collective."""
        if self._axis.size == 1:
            return
        regions = [region for flat in node if (region := self._region(flat)) is not None]
        if self._shared is not None and len(regions) == len(node):
            for region in regions:
                self._shared.start(region)
            self._shared.wait_all()
            return
        scratch = layout.memory()
        sum_by_messages(self._axis, node, scratch)
        layout.free([scratch])

    def _region(self, flat: Tensor) -> RegisteredBuffer | None:
        """Where the ranks' parts lie; nodes are used again and again, and a new one is new on every rank."""
        if self._shared is None:
            return None
        if not is_shared(flat):
            self._regions[flat.data_ptr()] = self._shared.register(flat, pairwise=True)
        return self._regions[flat.data_ptr()]

    def clear(self) -> None:
        self._regions.clear()

    def leave(self) -> None:
        self._regions.clear()
        if self._shared is not None:
            self._shared.counters.close()


def sum_by_messages(axis: Axis, node: FlatBuffers, scratch: FlatBuffers) -> None:
    """Adds the nodes of all ranks by the tree, in place: the same bits on all. Collective: every rank must call it."""
    for flat, parts in zip(node, scratch, strict=True):
        dist.all_to_all_single(parts, flat, group=axis.group)
        total = tree_sum(parts.view(axis.size, -1).unbind())
        if flat.is_cuda:  # between two ranks gloo sends from host memory alone
            dist.all_gather_into_tensor(flat, total, group=axis.group)
        else:
            _all_gather_p2p(axis, total, flat.view(axis.size, -1))


def _all_gather_p2p(axis: Axis, mine: Tensor, everybody: Tensor) -> None:
    """Fills row r of `everybody` with what rank r has; gloo's all_gather copies twice and takes twice as long."""
    everybody[axis.rank].copy_(mine)
    others = [rank for rank in range(axis.size) if rank != axis.rank]
    sends = [dist.P2POp(dist.isend, mine, axis.ranks[rank], axis.group) for rank in others]
    receives = [dist.P2POp(dist.irecv, everybody[rank], axis.ranks[rank], axis.group) for rank in others]
    for work in dist.batch_isend_irecv(sends + receives):
        work.wait()
