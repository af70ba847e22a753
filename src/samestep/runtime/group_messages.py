"""Collectives of a process group by plans, over messages that belong to this group alone.

Ranks on several hosts have no memory in common; and an algorithm may be asked for. The plans are those of
:mod:`samestep.collectives.choose`, priced for links that are measured when the first plan is needed; the messages go
over a gloo group of their own, so that they never mix with those of gloo's own collectives.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from samestep.collectives import engine
from samestep.collectives.choose import choose
from samestep.collectives.engine import ScratchBuffers, Work
from samestep.collectives.measure import measure
from samestep.collectives.plan import Operation, Plan
from samestep.collectives.point_to_point import PointToPoint
from samestep.errors import PeerError, UsageError
from samestep.launch.failure import one_line
from samestep.network.links import Link, Links
from samestep.runtime.group_memory import Place

__all__: list[str] = []


class GroupMessages:
    """The plans of one rank of a group; all of them call the same ones in the same order.

    Args:
        store: where the ranks find each other.
        place: of this rank.
        algorithm: how the names of the plans begin; "" for the cheapest.
    """

    def __init__(self, store: Store, place: Place, algorithm: str = "") -> None:
        self._place = place
        self._algorithm = algorithm
        timeout = timedelta(seconds=place.timeout_s)
        group: Any = dist.ProcessGroupGloo(PrefixStore("messages", store), place.rank, place.size, timeout)
        self._group: dist.ProcessGroup = group  # of C++'s Backend, with the methods that matter
        self._transport = _Named(PointToPoint(self._group), place)
        self._scratch = ScratchBuffers()
        self._links: Links | None = None
        self._plans: dict[tuple[Operation, int, int], Plan] = {}

    def run(self, operation: Operation, flat: Tensor, root: int = 0) -> None:
        """Does this rank's part of a collective, in place. Collective.

        Args:
            operation: that the algorithm has a plan for.
            flat: shape (elements,), contiguous, on the CPU.
            root: of a broadcast.

        Raises:
            PeerError: a rank is gone.
        """
        engine.run(self.plan(operation, flat.nbytes, root), flat, self._transport, self._scratch)

    def plan(self, operation: Operation, nbytes: int, root: int = 0) -> Plan:
        """Returns the plan for so many bytes, chosen once for each power of two."""
        rounded = 1 << max(0, nbytes - 1).bit_length()
        key = operation, rounded, root
        if key not in self._plans:
            self._links = self._links or measure(self._group, self._place.local)
            self._plans[key] = plans(self._algorithm, self._place.size, rounded, self._links, operation, root)[0]
        return self._plans[key]


def plans(
    algorithm: str, ranks: int, nbytes: float, links: Links, operation: Operation = "all_reduce", root: int = 0
) -> list[Plan]:
    """Returns the plans whose names begin with `algorithm`, the cheapest first; in how many pieces is their affair.

    Example:
        >>> [plan.name for plan in plans("ring", 4, 1e6, Links(Link(1e-5, 1e9)))]
        ['ring']
    """
    offers = choose(ranks, nbytes, links, operation, root).offers
    return [offer.plan for offer in offers if offer.plan.name.startswith(_kind(algorithm))]


def _kind(name: str) -> str:
    """Returns what a plan is called for any number of bytes: "double tree", of "double tree of 8"."""
    return name.partition(" of ")[0]


def operations(algorithm: str, place: Place) -> set[Operation]:
    """Returns what an algorithm has plans for, among these ranks.

    Raises:
        UsageError: no plan begins with this name; says which there are.
    """
    each: tuple[Operation, ...] = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
    some = Link(1e-5, 1e9)
    links = Links(some, some if place.local else None, place.local)
    found = {operation for operation in each if plans(algorithm, place.size, 1e6, links, operation)}
    if not found:
        names = sorted(
            {_kind(plan.name) for operation in each for plan in plans("", place.size, 1e6, links, operation)}
        )
        raise UsageError(
            f"no algorithm for {place.size} ranks is called {algorithm!r}: give the beginning of one of these names: "
            + ", ".join(names)
        )
    return found


class _Named:
    """A transport whose errors name the rank at the other end; gloo's name an address."""

    def __init__(self, transport: PointToPoint, place: Place) -> None:
        self._transport = transport
        self._place = place
        self.rank = transport.rank
        self.size = transport.size

    def isend(self, tensor: Tensor, target: int, tag: int) -> Work:
        try:
            return _Awaited(self._transport.isend(tensor, target, tag), self, target)
        except RuntimeError as error:
            self.lost(target, error)

    def irecv(self, tensor: Tensor, source: int, tag: int) -> Work:
        try:
            return _Awaited(self._transport.irecv(tensor, source, tag), self, source)
        except RuntimeError as error:
            self.lost(source, error)

    def lost(self, other: int, error: RuntimeError) -> NoReturn:
        names, processes = self._place.names, self._place.neighbours.processes
        raise PeerError(
            f"rank {names[self.rank]} has lost rank {names[other]} (process {processes[other]}): {one_line(str(error))}"
        ) from error


class _Awaited:
    """A message, and who is at its other end."""

    def __init__(self, work: Work, transport: _Named, other: int) -> None:
        self._work = work
        self._transport = transport
        self._other = other

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            self._transport.lost(self._other, error)
