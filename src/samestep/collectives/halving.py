"""Recursive halving and doubling, the butterfly: as few bytes as the ring, in as few rounds as a tree.

4 ranks, blocks a b c d. With each partner a rank keeps one half of what it has, and gives the other away:

               [1] with r xor 1       [2] with r xor 2        [3] with r xor 2      [4] with r xor 1
    rank 0     keeps ab, gives cd     keeps a, gives b        a ─▶ has ab           ab ─▶ has abcd
    rank 1     keeps cd, gives ab     keeps c, gives d        c ─▶ has cd           cd ─▶ has abcd
    rank 2     keeps ab, gives cd     keeps b, gives a        b ─▶ has ab           ab ─▶ has abcd
    rank 3     keeps cd, gives ab     keeps d, gives c        d ─▶ has cd           cd ─▶ has abcd
               reduce-scatter: what is given is added         all-gather: the same backwards

The all-reduce begins with the nearest partner, so the largest halves stay on a host, or a group of a dragonfly. That
leaves rank 1 with block c: a reduce-scatter, where it must have block b, begins with the farthest.

Cost: 2 log2 p alpha + 2 (p-1)/p n beta + (p-1)/p n gamma for a power of two. Else the all-reduce takes the power below
and 2 alpha + 2 n beta + n gamma more for the idle ranks (:class:`samestep.collectives.rounds.PowerOfTwoFold`).

Bits: one rank finishes each block and the others are sent copies. Each block of the all-reduce is added over the same
pairs as in :mod:`samestep.collectives.doubling`: the two give the same bits, wherever an element lies. The
reduce-scatter's pairs are others, also the same for all blocks.

Source: R. Rabenseifner, "Optimization of Collective Reduction Operations", ICCS 2004.
"""

from __future__ import annotations

from collections.abc import Sequence

from samestep.collectives.plan import Plan, Rounds, Transfer
from samestep.collectives.rounds import PowerOfTwoFold, remap, reversed_rounds

__all__: list[str] = []


def all_reduce(ranks: int) -> Plan:
    """Returns the plan by which all ranks end with the sum.

    >>> [len(all_reduce(ranks).rounds) for ranks in (1, 2, 4, 7, 8)]
    [0, 2, 4, 6, 6]
    """
    fold = PowerOfTwoFold(ranks)
    blocks = len(fold.members)
    nearest_first = _halving(_distances(fold))
    begins, ends = [0] * ranks, [blocks] * ranks
    rounds = (
        fold.gather(begins, ends, adds=True)
        + remap(nearest_first + _doubling(nearest_first), fold.members, range(blocks + 1))
        + fold.scatter(begins, ends)
    )
    return Plan("halving and doubling", "all_reduce", ranks, blocks, rounds)


def reduce_scatter(ranks: int) -> Plan:
    """Returns the plan by which rank r ends with block r of the sum; its other blocks are left half added.

    >>> len(reduce_scatter(8).rounds)
    3
    """
    fold = PowerOfTwoFold(ranks)
    everything = fold.gather([0] * ranks, [ranks] * ranks, adds=True)
    its_own = fold.scatter(range(ranks), range(1, ranks + 1))
    halving = remap(_halving(_distances(fold)[::-1]), fold.members, [*fold.members, ranks])
    return Plan("halving", "reduce_scatter", ranks, ranks, everything + halving + its_own)


def all_gather(ranks: int) -> Plan:
    """Returns the plan by which all ranks end with block r of rank r, for every r.

    >>> len(all_gather(8).rounds)
    3
    """
    fold = PowerOfTwoFold(ranks)
    its_own = fold.gather(range(ranks), range(1, ranks + 1), adds=False)
    everything = fold.scatter([0] * ranks, [ranks] * ranks)
    doubling = remap(_doubling(_halving(_distances(fold)[::-1])), fold.members, [*fold.members, ranks])
    return Plan("doubling", "all_gather", ranks, ranks, its_own + doubling + everything)


def _distances(fold: PowerOfTwoFold) -> list[int]:
    return [1 << bit for bit in range(len(fold.members).bit_length() - 1)]


def _halving(distances: Sequence[int]) -> Rounds:
    """[1], [2]: a rank whose bit is set keeps the upper half of what it has, else the lower."""
    ranks = 1 << len(distances)
    kept = [(0, ranks)] * ranks
    rounds = []
    for distance in distances:
        transfers = []
        for rank, (begin, end) in enumerate(kept):
            halves = [(begin, (begin + end) // 2), ((begin + end) // 2, end)]
            upper = bool(rank & distance)
            kept[rank] = halves[upper]
            transfers.append(Transfer(rank, rank ^ distance, *halves[not upper], adds=True))
        rounds.append(tuple(transfers))
    return tuple(rounds)


def _doubling(halving: Rounds) -> Rounds:
    """[3], [4]: what was given away comes back, from the rank that has all of it by now."""
    return tuple(tuple(one._replace(adds=False) for one in transfers) for transfers in reversed_rounds(halving))
