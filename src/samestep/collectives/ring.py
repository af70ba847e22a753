"""Ring: every rank talks to its two neighbours only; the least that can be sent, in the most rounds.

4 ranks, 4 blocks. What rank r sends to rank r + 1:

                [1] reduce-scatter: added on arrival            [2] all-gather: put in its place
    round         0         1         2                           3         4         5
    0 ─▶ 1      block 3   block 2   block 1 ─ rank 1 has all    block 0   block 3   block 2
    1 ─▶ 2      block 0   block 3   block 2   of block 1        block 1   block 0   block 3
    2 ─▶ 3      block 1   block 0   block 3                     block 2   block 1   block 0
    3 ─▶ 0      block 2   block 1   block 0                     block 3   block 2   block 1

Cost: 2 (p-1) alpha + 2 (p-1)/p n beta + (p-1)/p n gamma; no algorithm that sends messages sends fewer bytes.

Bits: one rank finishes each block, and the others are sent copies, so all ranks end with the same. Block b is added in
the order b+1, b+2, ..., b, so the bits of an element depend on the block it lies in. Gloo's older `AllreduceRing`,
which torch does not call, lets every rank's own input circulate, and every rank adds in an order of its own.

Source: P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69, 2009.
"""

from __future__ import annotations

from samestep.collectives.plan import Plan, Rounds, Transfer, check_ranks

__all__: list[str] = []


def all_reduce(ranks: int) -> Plan:
    """Returns the plan by which all ranks end with the sum.

    >>> len(all_reduce(4).rounds)
    6
    """
    check_ranks(ranks)
    return Plan("ring", "all_reduce", ranks, ranks, scattering(ranks) + gathering(ranks))


def reduce_scatter(ranks: int) -> Plan:
    """Returns the plan by which rank r ends with block r of the sum; its other blocks are left half added."""
    check_ranks(ranks)
    return Plan("ring", "reduce_scatter", ranks, ranks, scattering(ranks))


def all_gather(ranks: int) -> Plan:
    """Returns the plan by which all ranks end with block r of rank r, for every r."""
    check_ranks(ranks)
    return Plan("ring", "all_gather", ranks, ranks, gathering(ranks))


def scattering(ranks: int) -> Rounds:
    """Returns [1]: block b goes round from rank b + 1, growing, and ends on rank b."""
    return tuple(
        tuple(_to_next(rank, ranks, block=rank - 1 - number, adds=True) for rank in range(ranks))
        for number in range(ranks - 1)
    )


def gathering(ranks: int) -> Rounds:
    """Returns [2]: block b goes round from rank b, and ends on rank b - 1."""
    return tuple(
        tuple(_to_next(rank, ranks, block=rank - number, adds=False) for rank in range(ranks))
        for number in range(ranks - 1)
    )


def _to_next(rank: int, ranks: int, block: int, *, adds: bool) -> Transfer:
    block %= ranks
    return Transfer(rank, (rank + 1) % ranks, block, block + 1, adds)
