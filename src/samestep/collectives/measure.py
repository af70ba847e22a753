"""Measures the links of a process group: latency and bandwidth, by timed messages.

    inside a host      0 ─▶ 1 ─▶ 2 ─▶ 3 ─▶ (0)      all ranks of a host at once, each to the next: as in a ring's round
    between hosts      0 ─────────────────▶ 4 ─▶ (0) one rank of each host, so that each NIC carries one message
    crowded            0 ◀▶ 4, 0 ◀▶ 8, 4 ◀▶ 8        one of each of 3 hosts or more, each with all others at once
    adding             y += x, on all ranks at once

Messages of several sizes go round; the fastest of a few series is kept, because whatever disturbs a message makes it
slower; a line through the times gives latency and bandwidth (:func:`samestep.network.links.fit`). What is measured is
what the engine will meet, Python included. Rank 0's figures are broadcast, so that all ranks choose the same.

Source: the method of NetPIPE (Q. Snell, A. Mikler and J. Gustafson, 1996), with as many pairs at once as will be.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
import torch.distributed as dist

from samestep.collectives import engine, tree
from samestep.collectives.engine import Transport
from samestep.collectives.point_to_point import PointToPoint
from samestep.errors import UsageError
from samestep.network.links import Link, Links, fit

SIZES = (8, 4096, 65536, 1 << 20)  # bytes: where latency is all, where bandwidth is, and between
SERIES = 5
MESSAGES = 8  # in a series
WARMING = 3  # exchanges
ADDED = 1 << 20  # elements of float32


def measure(
    group: dist.ProcessGroup,
    local: int | None = None,
    *,
    sizes: Sequence[int] = SIZES,
    crowds: bool = False,
    series: int = SERIES,
    clock: Callable[[], float] = time.perf_counter,
) -> Links:
    """Returns what messages between the ranks of a group take; the same on every rank.

    Collective: every rank of the group must call it. It takes some tens of milliseconds on one host.

    Args:
        group: on host memory (gloo).
        local: ranks on each host, neighbours in the group; None where all are on one.
        sizes: of the messages timed, in bytes.
        crowds: whether to see, too, what is left of the bandwidth where all hosts, 3 or more, exchange with all others.
        series: of messages, of which the fastest counts.
        clock: returns seconds.

    Raises:
        UsageError: a group of one rank has no links; or the ranks are not the same number on each host.
    """
    transport = PointToPoint(group)
    each = transport.size if local is None else local
    if transport.size < 2 or each < 1 or transport.size % each:
        raise UsageError(
            f"links cannot be measured among {transport.size} ranks, {each} on each host: "
            "take 2 ranks or more, and as many on each host"
        )
    timer = _Timer(transport, sizes, clock, series)
    first = transport.rank - transport.rank % each
    neighbours = range(first, first + each)
    leaders = range(0, transport.size, each)
    found = [timer.link(ring) if len(ring) > 1 else None for ring in (neighbours, leaders)]
    crowded = timer.crowded(leaders, found[1]) if crowds and len(leaders) > 2 else 1.0
    own = [(link.latency_s, link.bytes_per_s) if link else (0.0, 0.0) for link in found]
    figures = torch.tensor([*own[0], *own[1], timer.adding(), crowded], dtype=torch.float64)
    engine.run(tree.broadcast(transport.size), figures, transport)  # rank 0's, on every rank
    inside_s, inside_bytes, between_s, between_bytes, adding, crowded = figures.tolist()
    between = Link(between_s, between_bytes) if between_bytes else None
    if between and not inside_bytes:  # one rank a host
        return Links(between, adding_bytes_per_s=adding, crowded=crowded)
    inside = Link(inside_s, inside_bytes)
    return Links(inside, between, each if between else None, adding_bytes_per_s=adding, crowded=crowded)


class _Timer:
    """Times things that all ranks do at once."""

    def __init__(
        self, transport: Transport, sizes: Sequence[int], clock: Callable[[], float], series: int = SERIES
    ) -> None:
        self._transport = transport
        self._sizes = sizes
        self._series = series
        self._clock = clock
        self._sync_plan = tree.all_reduce(transport.size)

    def link(self, ring: Sequence[int]) -> Link | None:
        """Returns the link along a ring of ranks, or None on a rank that is not in it, and only waits."""
        times = [(float(size), self._shift(ring, size)) for size in self._sizes]
        return fit(times) if self._transport.rank in ring else None

    def crowded(self, ranks: Sequence[int], link: Link | None) -> float:
        """Returns the part of a link's bandwidth that is left where these ranks exchange with each other, all at once.

        Unlike a message's, its usual time counts, not the fastest, and until the last rank has ended; but not those of
        the first exchanges, in which TCP finds out how much each way bears.
        """
        others = [rank for rank in ranks if rank != self._transport.rank] if self._transport.rank in ranks else []
        share = max(self._sizes) // (len(ranks) - 1)
        out, into = torch.zeros(share, dtype=torch.uint8), [torch.zeros(share, dtype=torch.uint8) for _ in others]
        idle = self._fastest(self._barrier)
        times = []
        for _ in range(WARMING + self._series):
            self._barrier()
            start = self._clock()
            works = [self._transport.irecv(each, rank, 0) for each, rank in zip(into, others, strict=True)]
            works += [self._transport.isend(out, rank, 0) for rank in others]
            for work in works:
                work.wait()
            self._barrier()
            times.append(self._clock() - start)
        if link is None:
            return 1.0
        alone = len(others) * share / link.bytes_per_s
        crowd = median(times[WARMING:]) - idle - len(others) * link.latency_s
        return 1.0 if alone >= crowd or not alone else float(f"{alone / crowd:.3g}")

    def adding(self) -> float:
        """Returns how many bytes are added to others in a second."""
        one, other = torch.zeros(ADDED), torch.zeros(ADDED)
        seconds = self._fastest(lambda: one.add_(other))
        return one.numel() * one.element_size() / seconds

    def _shift(self, ring: Sequence[int], size: int) -> float:
        """Returns the seconds of a message of `size` bytes from each rank of the ring to the next."""
        if self._transport.rank not in ring:
            return self._fastest(lambda: None)
        place = ring.index(self._transport.rank)
        after, before = ring[(place + 1) % len(ring)], ring[place - 1]
        out, into = torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)

        def once() -> None:
            works = [self._transport.irecv(into, before, 0), self._transport.isend(out, after, 0)]
            for work in works:
                work.wait()

        return self._fastest(once)

    def _fastest(self, once: Callable[[], object]) -> float:
        seconds = []
        for _ in range(self._series):
            self._barrier()
            start = self._clock()
            for _ in range(MESSAGES):
                once()
            seconds.append((self._clock() - start) / MESSAGES)
        return min(seconds)

    def _barrier(self) -> None:
        """Returns when all ranks have come, at nearly the same moment."""
        engine.run(self._sync_plan, torch.zeros(1), self._transport)
