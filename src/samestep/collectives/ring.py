"""Ring: every rank sends to the next only; the fewest bytes, in the most rounds.

4 ranks, 4 blocks. What rank r sends to rank r + 1:

                [1] reduce-scatter: added on arrival            [2] all-gather: put in its place
    round         0         1         2                           3         4         5
    0 ─▶ 1      block 3   block 2   block 1 ─ rank 1 has all    block 0   block 3   block 2
    1 ─▶ 2      block 0   block 3   block 2   of block 1        block 1   block 0   block 3
    2 ─▶ 3      block 1   block 0   block 3                     block 2   block 1   block 0
    3 ─▶ 0      block 2   block 1   block 0                     block 3   block 2   block 1

Cost: 2 (p-1) alpha + 2 (p-1)/p n beta + (p-1)/p n gamma; no algorithm that sends messages sends fewer bytes.

Bits: one rank finishes each block, and the others are sent copies. Block b is added in the order b+1, b+2, ..., b, so
the bits of an element depend on the block it lies in.

Source: P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69, 2009.
"""

from __future__ import annotations

import numpy as np

from samestep.collectives.plan import Plan
from samestep.network.messages import Ints, MessageRound, Messages


def all_reduce(ranks: int) -> Plan:
    """Returns the plan by which all ranks end with the sum.

    >>> len(all_reduce(4).rounds)
    6
    """
    return Plan("ring", "all_reduce", ranks, ranks, lambda: [*scatter(ranks), *gather(ranks)])


def reduce_scatter(ranks: int) -> Plan:
    """Returns the plan by which rank r ends with block r of the sum; its other blocks are left half added."""
    return Plan("ring", "reduce_scatter", ranks, ranks, lambda: scatter(ranks))


def all_gather(ranks: int) -> Plan:
    """Returns the plan by which all ranks end with block r of rank r, for every r."""
    return Plan("ring", "all_gather", ranks, ranks, lambda: gather(ranks))


def scatter(ranks: int, segments: int = 1) -> list[Messages]:
    """Returns [1]: block b goes round from rank b + 1, growing, and ends on rank b; segment after segment of it."""
    return _to_next(ranks, segments, behind=1, adds=True)


def gather(ranks: int, segments: int = 1) -> list[Messages]:
    """Returns [2]: block b goes round from rank b, and ends on rank b - 1; segment after segment of it."""
    return _to_next(ranks, segments, behind=0, adds=False)


def _to_next(ranks: int, segments: int, behind: int, *, adds: bool) -> list[Messages]:
    if ranks == 1:
        return []
    rank = np.arange(ranks)

    def begin(t: int) -> Ints:
        blocks: Ints = (rank - behind - t // segments) % ranks * segments + t % segments
        return blocks

    return [MessageRound(rank, (rank + 1) % ranks, begin, 1, adds, repeat=(ranks - 1) * segments)]
