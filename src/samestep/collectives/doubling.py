"""Recursive doubling: everything to a partner, twice as far away each round; the fewest rounds, the most bytes.

4 ranks, 1 block: what each holds after the round.

               at first     [1] with r xor 1      [2] with r xor 2
    rank 0        0            0+1                   (0+1)+(2+3)
    rank 1        1            1+0                   (1+0)+(3+2)
    rank 2        2            2+3                   (2+3)+(0+1)
    rank 3        3            3+2                   (3+2)+(1+0)

Cost: log2 p (alpha + n beta + n gamma), p rounded down to a power of two; where it had to be, 2 alpha + 2 n beta +
n gamma more for the ranks that sit out (:class:`samestep.collectives.compose.Fold`).

Bits: every rank adds the same pairs and only the order within a pair differs, which changes nothing: floating-point
addition commutes. All elements are added in the same order, whatever lies where, so cutting the same gradients into
other buckets changes no bit. For powers of two it is the order of :func:`samestep.topology.tree_sum`, in which
virtual ranks are added.

Source: R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of Collective Communication Operations in MPICH",
IJHPCA 19, 2005.
"""

from __future__ import annotations

from samestep.collectives.compose import Fold, placed
from samestep.collectives.plan import Plan, Rounds, Transfer, check_ranks

__all__: list[str] = []


def all_reduce(ranks: int) -> Plan:
    """Returns the plan by which all ranks end with the sum.

    >>> [len(all_reduce(ranks).rounds) for ranks in (1, 2, 4, 7, 8)]
    [0, 1, 2, 4, 3]
    """
    check_ranks(ranks)
    fold = Fold(ranks)
    begins, ends = [0] * ranks, [1] * ranks
    rounds = (
        fold.gather(begins, ends, adds=True)
        + placed(_exchanges(len(fold.members)), fold.members, (0, 1))
        + fold.scatter(begins, ends)
    )
    return Plan("recursive doubling", "all_reduce", ranks, 1, rounds)


def _exchanges(ranks: int) -> Rounds:
    """[1], [2], ...: with the rank that differs in one bit, from the lowest bit up."""
    return tuple(
        tuple(Transfer(rank, rank ^ (1 << bit), 0, 1, adds=True) for rank in range(ranks))
        for bit in range(ranks.bit_length() - 1)
    )
