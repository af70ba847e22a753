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
and 2 alpha + 2 n beta + n gamma more for the idle ranks (:func:`samestep.collectives.doubling.fold`).

Bits: one rank finishes each block and the others are sent copies. Each block of the all-reduce is added over the same
pairs as in :mod:`samestep.collectives.doubling`: the two give the same bits, wherever an element lies. The
reduce-scatter's pairs are others, also the same for all blocks.

Source: R. Rabenseifner, "Optimization of Collective Reduction Operations", ICCS 2004.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from samestep.collectives.doubling import fold, gather_idle, scatter_idle
from samestep.collectives.plan import Plan, check_ranks
from samestep.network.messages import Ints, Messages, reverse, send


def all_reduce(ranks: int) -> Plan:
    """Returns the plan by which all ranks end with the sum.

    >>> [len(all_reduce(ranks).rounds) for ranks in (1, 2, 4, 7, 8)]
    [0, 2, 4, 6, 6]
    """
    check_ranks(ranks)
    members, idle = fold(ranks)
    blocks = len(members)

    def rounds() -> Iterator[Messages]:
        scatter = list(_halving(members, np.arange(blocks + 1), range(_bits(blocks))))
        yield from gather_idle(idle, width=blocks)
        yield from scatter
        yield from reverse(scatter, adds=False)
        yield from scatter_idle(idle, width=blocks)

    return Plan("halving and doubling", "all_reduce", ranks, blocks, rounds)


def reduce_scatter(ranks: int) -> Plan:
    """Returns the plan by which rank r ends with block r of the sum; its other blocks are left half added.

    >>> len(reduce_scatter(8).rounds)
    3
    """

    def rounds() -> Iterator[Messages]:
        idle = fold(ranks)[1]
        yield from gather_idle(idle, width=ranks)
        yield from _farthest_first(ranks)
        yield from scatter_idle(idle, idle)

    return Plan("halving", "reduce_scatter", ranks, ranks, rounds)


def all_gather(ranks: int) -> Plan:
    """Returns the plan by which all ranks end with block r of rank r, for every r.

    >>> len(all_gather(8).rounds)
    3
    """

    def rounds() -> Iterator[Messages]:
        idle = fold(ranks)[1]
        yield from gather_idle(idle, idle, adds=False)
        yield from reverse(_farthest_first(ranks), adds=False)
        yield from scatter_idle(idle, width=ranks)

    return Plan("doubling", "all_gather", ranks, ranks, rounds)


def _halving(members: Ints, edges: Ints, bits: Iterable[int]) -> Iterator[Messages]:
    """[1], [2]: a rank whose bit is set keeps the upper half of what it has, else the lower.

    [3] and [4] are the same backwards: what was given away comes back, from who has it whole by now.

    Args:
        members: a power of two of ranks.
        edges: where the blocks of each member begin, and the end of the last.
        bits: by which partners differ, one after another.
    """
    place = np.arange(len(members))
    begin, width = np.zeros_like(place), len(members)
    for bit in bits:
        width //= 2
        kept = begin + np.where(place >> bit & 1, width, 0)
        given = 2 * begin + width - kept
        first = edges[given]
        yield send(members, members[place ^ (1 << bit)], first, edges[given + width] - first, adds=True)
        begin = kept


def _farthest_first(ranks: int) -> Iterator[Messages]:
    """Over the blocks of each member: its own, and that of the rank behind it that sits out."""
    members = fold(ranks)[0]
    return _halving(members, np.append(members, ranks), reversed(range(_bits(len(members)))))


def _bits(power: int) -> int:
    return power.bit_length() - 1
