"""Executes one rank's part of a plan on a real buffer, over any transport.

A round, and what happens meanwhile:

    [1] what the last round brought and this one needs is added
    [2] every receive of this round is posted, then every send            so no plan can deadlock: no rank waits
    [3] what the last round brought and this one does not need is added   before it has posted all it has to
    [4] wait for all of [2]

    └─ round k ──────────────────────┘└─ round k + 1 ───────────────────┘
      [2] post  ── travels ──── [4]     [2] post  ── travels ──── [4]
                [3] add of k - 1                  [3] add of k

What is to be added arrives in scratch memory, because the block it belongs to may be on its way to another rank. Two
buffers take turns, so that one is added from while the other is filled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from samestep.collectives.plan import Plan, RankRound, Transfer
from samestep.errors import DeviceError, UsageError


class Work(Protocol):
    """A message on its way."""

    def wait(self) -> Any:
        """Returns when the tensor may be used again (sent), or holds what was sent (received)."""


class Transport(Protocol):
    """Carries contiguous 1-D tensors between ranks; two messages from one rank to another match by their tag."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    def isend(self, tensor: Tensor, target: int, tag: int) -> Work:
        """Begins to send; the tensor must not change before `wait()` has returned."""

    def irecv(self, tensor: Tensor, source: int, tag: int) -> Work:
        """Begins to receive."""


class ScratchBuffers:
    """Memory for what arrives to be added. It grows to what is asked for and stays: fresh memory costs page faults."""

    def __init__(self) -> None:
        self._memory: dict[tuple[torch.dtype, torch.device, int], Tensor] = {}

    def take(self, like: Tensor, elements: int, turn: int) -> Tensor:
        """Returns 1-D memory of at least so many elements; `turn` 0 and 1 are different memory."""
        key = (like.dtype, like.device, turn)
        if key not in self._memory or self._memory[key].numel() < elements:
            self._memory[key] = torch.empty(elements, dtype=like.dtype, device=like.device)
        return self._memory[key]


def run(plan: Plan, buffer: Tensor, transport: Transport, scratch: ScratchBuffers | None = None) -> None:
    """Does this rank's part of a plan, in place. Collective: every rank must call it, with the same plan.

    Args:
        plan: over as many ranks as the transport connects.
        buffer: shape (elements,), contiguous, of the same length and dtype on every rank.
        transport: to the other ranks.
        scratch: memory to use again the next time.

    Raises:
        UsageError: the plan is for another number of ranks, or the buffer is not flat.

    Example:
        >>> import torch.distributed as dist
        >>> from samestep.collectives import ring
        >>> from samestep.collectives.point_to_point import PointToPoint
        >>> group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
        >>> run(ring.all_reduce(1), torch.ones(3), PointToPoint(group))
    """
    for _ in steps(plan, buffer, transport, scratch):
        pass


def steps(plan: Plan, buffer: Tensor, transport: Transport, scratch: ScratchBuffers | None = None) -> Iterator[None]:
    """The same, pausing in every round between [3] and [4], so that many ranks can be simulated in one process."""
    _check(plan, buffer, transport)
    flat = buffer.detach()
    edges = plan.edges(flat.numel())
    memory = ScratchBuffers() if scratch is None else scratch
    arrived: list[tuple[Transfer, Tensor]] = []
    for number, each in enumerate(plan.of_rank(transport.rank)):
        # if the buffer has fewer elements than the plan has blocks, some blocks are empty and are not sent
        part = RankRound(*(tuple(one for one in some if edges[one.begin] < edges[one.end]) for some in each))
        if _needed(arrived, part):
            arrived = _add(arrived, flat, edges)  # [1]
        arriving, works = _post(part, flat, edges, transport, memory, number % 2)  # [2]
        _add(arrived, flat, edges)  # [3]
        yield
        for work in works:  # [4]
            work.wait()
        arrived = arriving
    _add(arrived, flat, edges)


def _post(
    part: RankRound, flat: Tensor, edges: Sequence[int], transport: Transport, memory: ScratchBuffers, turn: int
) -> tuple[list[tuple[Transfer, Tensor]], list[Work]]:
    """Returns what will have to be added, with the memory that it arrives in, and what is on its way."""
    adds = [one for one in part.receives if one.adds]
    lengths = [edges[one.end] - edges[one.begin] for one in adds]
    pieces = torch.split(memory.take(flat, sum(lengths), turn)[: sum(lengths)], lengths) if adds else ()
    arriving = list(zip(adds, pieces, strict=True))
    places = arriving + [(one, _view(one, flat, edges)) for one in part.receives if not one.adds]
    # within a round, two transfers between the same ranks never begin at the same block: the plan sees to it
    works = [transport.irecv(place, one.source, tag=one.begin) for one, place in places]
    works += [transport.isend(_view(one, flat, edges), one.target, tag=one.begin) for one in part.sends]
    return arriving, works


def _add(arrived: list[tuple[Transfer, Tensor]], flat: Tensor, edges: Sequence[int]) -> list[tuple[Transfer, Tensor]]:
    """Adds in the order of the sources; returns what is left to add: nothing."""
    for one, what in arrived:
        _view(one, flat, edges).add_(what)
    return []


def _needed(arrived: Sequence[tuple[Transfer, Tensor]], part: RankRound) -> bool:
    """Whether a round sends on, or replaces, what was not added yet."""
    spans = [(one.begin, one.end) for one, _ in arrived]
    touched = [*part.sends, *(one for one in part.receives if not one.adds)]
    return any(begin < one.end and one.begin < end for begin, end in spans for one in touched)


def _view(one: Transfer, flat: Tensor, edges: Sequence[int]) -> Tensor:
    return flat[edges[one.begin] : edges[one.end]]


def _check(plan: Plan, buffer: Tensor, transport: Transport) -> None:
    if plan.ranks != transport.size:
        raise UsageError(
            f"{plan.name} is a plan over {plan.ranks} ranks, and here are {transport.size}: plan for those"
        )
    if buffer.dim() != 1 or not buffer.is_contiguous():
        raise UsageError(
            f"a buffer of shape {tuple(buffer.shape)} and strides {buffer.stride()} is not flat: "
            "pass contiguous memory in one dim, such as tensor.contiguous().view(-1)"
        )
    if buffer.device.type != "cpu":
        raise DeviceError(
            f"a plan's messages travel in host memory, and this tensor is on {buffer.device}: copy it to the CPU, "
            "or let NCCL reduce it with torch.distributed.all_reduce"
        )
