"""Segmented ring and chain: chunks cut into segments, so that adding and forwarding overlap with sending.

Segmented ring, 2 segments a chunk. The ring of :mod:`samestep.collectives.ring` must add a chunk before it can send
it on, and the links are idle meanwhile. Here a segment is added while the next one travels:

    ring              ─ chunk 3 ─┤adds├─ chunk 2 ─┤adds├─ chunk 1 ─┤adds├
    [1] segmented     ─ 3a ─┤─ 3b ─┤─ 2a ─┤─ 2b ─┤─ 1a ─┤─ 1b ─┤
                            │adds 3a│adds 3b│adds 2a│ ...

    Cost: 2 (p-1) k alpha + 2 (p-1)/p n beta for k >= 2 segments, where adding is faster than receiving. The second
    segment saves all of (p-1)/p n gamma; more only shorten what travels alone.

Chain, 3 segments, 4 ranks: the first segment is on its way before the last has left.

    round             0       1       2       3       4
    [2] 0 ─▶ 1        a       b       c
        1 ─▶ 2                a       b       c
        2 ─▶ 3                        a       b       c

    Cost: (p - 2 + m) (alpha + n/m beta) for m segments; the best m is sqrt((p-2) n beta / alpha).

Bits: as in the ring, one rank finishes each segment and the others are sent copies. A chain adds from its far end to
its root, ((3 + 2) + 1) + 0, for all segments alike.

Sources: Open MPI's `allreduce_intra_ring_segmented`; for the chain, J. Pješivac-Grbović et al., "Performance analysis
of MPI collective operations", Cluster Computing 10, 2007.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from samestep.collectives import ring
from samestep.collectives.plan import Operation, Plan
from samestep.network.messages import Messages, reverse, send, with_root


def all_reduce(ranks: int, segments: int = 2) -> Plan:
    """Returns the ring's all-reduce with each of its chunks cut into `segments`.

    >>> plan = all_reduce(4, segments=3)
    >>> plan.name, plan.blocks, len(plan.rounds)
    ('segmented ring of 3', 12, 18)
    """
    return _ring(ranks, segments, "all_reduce", ring.scatter, ring.gather)


def reduce_scatter(ranks: int, segments: int = 2) -> Plan:
    """Returns the ring's reduce-scatter with each of its chunks cut into `segments`."""
    return _ring(ranks, segments, "reduce_scatter", ring.scatter)


def all_gather(ranks: int, segments: int = 2) -> Plan:
    """Returns the ring's all-gather with each of its chunks cut into `segments`."""
    return _ring(ranks, segments, "all_gather", ring.gather)


def broadcast(ranks: int, root: int = 0, segments: int = 8) -> Plan:
    """Returns the plan by which all ranks end with what `root` has, passed from rank to rank in `segments`.

    >>> len(broadcast(4, segments=3).rounds)
    5
    """
    make_rounds = partial(_chain, ranks, root, segments)
    return Plan(f"chain of {segments}", "broadcast", ranks, segments, make_rounds, root)


def reduce(ranks: int, root: int = 0, segments: int = 8) -> Plan:
    """Returns the plan by which `root` ends with the sum, added up from rank to rank in `segments`."""
    return Plan(f"chain of {segments}", "reduce", ranks, segments, lambda: reverse(_chain(ranks, root, segments)), root)


def _ring(ranks: int, segments: int, operation: Operation, *halves: Callable[[int, int], list[Messages]]) -> Plan:
    return Plan(
        f"segmented ring of {segments}",
        operation,
        ranks,
        ranks * segments,
        lambda: [one for half in halves for one in half(ranks, segments)],
    )


def _chain(ranks: int, root: int, segments: int) -> Iterator[Messages]:
    """[2]: rank r behind the root has segment s after round r + s - 1, and sends it on in the next."""
    for number in range(ranks - 2 + segments if ranks > 1 else 0):
        rank = np.arange(max(0, number - segments + 1), min(ranks - 1, number + 1))
        yield from with_root([send(rank, rank + 1, number - rank)], ranks, root)
