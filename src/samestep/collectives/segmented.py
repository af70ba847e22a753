"""Segmented ring and chain: chunks cut into segments, so that adding and forwarding overlap with sending.

Segmented ring, 2 segments a chunk. The ring of :mod:`samestep.collectives.ring` must add a chunk before it can send
it on, and the links are idle meanwhile. Here a segment is added while the next one travels:

    ring              ─ chunk 3 ─┤adds├─ chunk 2 ─┤adds├─ chunk 1 ─┤adds├
    [1] segmented     ─ 3a ─┤─ 3b ─┤─ 2a ─┤─ 2b ─┤─ 1a ─┤─ 1b ─┤
                            │adds 3a│adds 3b│adds 2a│ ...

    Cost: 2 (p-1) k alpha + 2 (p-1)/p n beta for k >= 2 segments, where adding is quicker than receiving. The second
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

from samestep.collectives import ring
from samestep.collectives.plan import Operation, Plan, Rounds, Transfer
from samestep.collectives.rounds import rooted

__all__: list[str] = []


def all_reduce(ranks: int, segments: int = 2) -> Plan:
    """Returns the ring's all-reduce with each of its chunks cut into `segments`.

    >>> plan = all_reduce(4, segments=3)
    >>> plan.name, plan.blocks, len(plan.rounds)
    ('segmented ring of 3', 12, 18)
    """
    return _segmented("all_reduce", ranks, ring.scattering(ranks) + ring.gathering(ranks), segments)


def reduce_scatter(ranks: int, segments: int = 2) -> Plan:
    """Returns the ring's reduce-scatter with each of its chunks cut into `segments`."""
    return _segmented("reduce_scatter", ranks, ring.scattering(ranks), segments)


def all_gather(ranks: int, segments: int = 2) -> Plan:
    """Returns the ring's all-gather with each of its chunks cut into `segments`."""
    return _segmented("all_gather", ranks, ring.gathering(ranks), segments)


def broadcast(ranks: int, root: int = 0, segments: int = 8) -> Plan:
    """Returns the plan by which all ranks end with what `root` has, passed from rank to rank in `segments`.

    >>> len(broadcast(4, segments=3).rounds)
    5
    """
    return rooted(f"chain of {segments}", "broadcast", ranks, segments, _chain(ranks, segments), root)


def reduce(ranks: int, root: int = 0, segments: int = 8) -> Plan:
    """Returns the plan by which `root` ends with the sum, added up from rank to rank in `segments`."""
    return rooted(f"chain of {segments}", "reduce", ranks, segments, _chain(ranks, segments), root)


def _segmented(operation: Operation, ranks: int, rounds: Rounds, segments: int) -> Plan:
    """[1]: segment after segment of each chunk, where the ring sends the chunk."""
    cut = tuple(
        tuple(one._replace(begin=one.begin * segments + each, end=one.begin * segments + each + 1) for one in transfers)
        for transfers in rounds
        for each in range(segments)
    )
    return Plan(f"segmented ring of {segments}", operation, ranks, ranks * segments, cut)


def _chain(ranks: int, segments: int) -> Rounds:
    """[2]: rank r has segment s after round r + s - 1, and sends it on in the next."""
    return tuple(
        tuple(
            Transfer(rank, rank + 1, number - rank, number - rank + 1)
            for rank in range(ranks - 1)
            if 0 <= number - rank < segments
        )
        for number in range(ranks - 2 + segments if ranks > 1 else 0)
    )
