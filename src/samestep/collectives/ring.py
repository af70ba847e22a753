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

from samestep.collectives.plan import Plan, Rounds, Transfer

__all__: list[str] = []


def all_reduce(ranks: int) -> Plan:
    """Returns the plan by which all ranks end with the sum.

    >>> len(all_reduce(4).rounds)
    6
    """
    return Plan("ring", "all_reduce", ranks, ranks, scattering(ranks) + gathering(ranks))


def reduce_scatter(ranks: int) -> Plan:
    """Returns the plan by which rank r ends with block r of the sum; its other blocks are left half added."""
    return Plan("ring", "reduce_scatter", ranks, ranks, scattering(ranks))


def all_gather(ranks: int) -> Plan:
    """Returns the plan by which all ranks end with block r of rank r, for every r."""
    return Plan("ring", "all_gather", ranks, ranks, gathering(ranks))


def scattering(ranks: int) -> Rounds:
    """Returns [1]: block b goes round from rank b + 1, growing, and ends on rank b."""
    return _rotations(ranks, first=-1, adds=True)


def gathering(ranks: int) -> Rounds:
    """Returns [2]: block b goes round from rank b, and ends on rank b - 1."""
    return _rotations(ranks, first=0, adds=False)


def _rotations(ranks: int, *, first: int, adds: bool) -> Rounds:
    def to_next(rank: int, block: int) -> Transfer:
        return Transfer(rank, (rank + 1) % ranks, block, block + 1, adds)

    return tuple(
        tuple(to_next(rank, (rank + first - number) % ranks) for rank in range(ranks)) for number in range(ranks - 1)
    )
