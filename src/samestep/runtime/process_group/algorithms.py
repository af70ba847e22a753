"""Collectives of a process group by the plans of :mod:`samestep.collectives.choose`, over the group's own messages.

The plans are priced for links that are measured when the first is needed; the messages go over a gloo group of their
own, so that they never mix with those of gloo's own collectives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

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
from samestep.launch.rank.failure import one_line
from samestep.network.links import Link, Links
from samestep.runtime.process_group.shared_memory import GroupInfo


class PlannedCollectives:
    """The plans of one rank of a group; all of them run the same ones in the same order.

    `algorithm` is how the names of the plans begin; "" for the cheapest.
    """

    def __init__(self, store: Store, info: GroupInfo, algorithm: str = "") -> None:
        self._info = info
        self._algorithm = algorithm
        timeout = timedelta(seconds=info.timeout_s)
        group: Any = dist.ProcessGroupGloo(PrefixStore("messages", store), info.rank, info.size, timeout)
        self._group: dist.ProcessGroup = group  # of C++'s Backend, with the methods that matter
        self._transport = _NamedPeers(PointToPoint(self._group), info)
        self._scratch = ScratchBuffers()
        self._links: Links | None = None
        self._plans: dict[tuple[Operation, int, int], Plan] = {}

    def run(self, operation: Operation, flat: Tensor, root: int = 0) -> None:
        """Runs this rank's part of a collective on `flat`, (elements,) and contiguous, in place. Collective."""
        engine.run(self.plan(operation, flat.nbytes, root), flat, self._transport, self._scratch)

    def plan(self, operation: Operation, nbytes: int, root: int = 0) -> Plan:
        """Returns the plan for so many bytes, chosen once for each power of two."""
        rounded = 1 << max(0, nbytes - 1).bit_length()
        key = operation, rounded, root
        if key not in self._plans:
            self._links = self._links or measure(self._group, self._info.ranks_per_host)
            self._plans[key] = plans(self._algorithm, self._info.size, rounded, self._links, operation, root)[0]
        return self._plans[key]


def plans(
    algorithm: str, ranks: int, nbytes: float, links: Links, operation: Operation = "all_reduce", root: int = 0
) -> list[Plan]:
    """Returns the plans whose names begin with `algorithm`, the cheapest first, in any number of pieces.

    Example:
        >>> [plan.name for plan in plans("ring", 4, 1e6, Links(Link(1e-5, 1e9)))]
        ['ring']
    """
    candidates = choose(ranks, nbytes, links, operation, root).candidates
    return [one.plan for one in candidates if one.plan.name.startswith(_kind(algorithm))]


def _kind(name: str) -> str:
    """Returns the name of a plan for any number of bytes: "double tree", of "double tree of 8"."""
    return name.partition(" of ")[0]


def operations(algorithm: str, info: GroupInfo) -> set[Operation]:
    """Returns the collectives that an algorithm has plans for, among these ranks."""
    each: tuple[Operation, ...] = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
    link = Link(1e-5, 1e9)
    links = Links(link, link if info.ranks_per_host else None, info.ranks_per_host)
    found = {operation for operation in each if plans(algorithm, info.size, 1e6, links, operation)}
    if not found:
        names = {_kind(plan.name) for operation in each for plan in plans("", info.size, 1e6, links, operation)}
        raise UsageError(
            f"no algorithm for {info.size} ranks is called {algorithm!r}: give the beginning of one of these names: "
            + ", ".join(sorted(names))
        )
    return found


class _NamedPeers:
    """A transport whose errors name the rank at the other end; gloo's name an address."""

    def __init__(self, transport: PointToPoint, info: GroupInfo) -> None:
        self._transport, self._info = transport, info
        self.rank, self.size = transport.rank, transport.size

    def isend(self, tensor: Tensor, target: int, tag: int) -> Work:
        return _NamedWork(self.call(target, lambda: self._transport.isend(tensor, target, tag)), self, target)

    def irecv(self, tensor: Tensor, source: int, tag: int) -> Work:
        return _NamedWork(self.call(source, lambda: self._transport.irecv(tensor, source, tag)), self, source)

    def call(self, other: int, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RuntimeError as error:
            names, process = self._info.names, self._info.host_map.processes[other]
            raise PeerError(
                f"rank {names[self.rank]} has lost rank {names[other]} (process {process}): {one_line(str(error))}"
            ) from error


@dataclass
class _NamedWork:
    work: Work
    transport: _NamedPeers
    other: int

    def wait(self) -> None:
        self.transport.call(self.other, self.work.wait)
