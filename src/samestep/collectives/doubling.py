"""Recursive doubling: everything to a partner, twice as far away each round; the fewest rounds, the most bytes.

4 ranks, 1 block: what each holds after the round.

               at first     [1] with r xor 1      [2] with r xor 2
    rank 0        0            0+1                   (0+1)+(2+3)
    rank 1        1            1+0                   (1+0)+(3+2)
    rank 2        2            2+3                   (2+3)+(0+1)
    rank 3        3            3+2                   (3+2)+(1+0)

Cost: log2 p (alpha + n beta + n gamma), p rounded down to a power of two; where it had to be, 2 alpha + 2 n beta +
n gamma more for the idle ranks (:func:`fold`).

Bits: every rank adds the same pairs and only the order within a pair differs, which changes nothing: floating-point
addition commutes. All elements are added in the same order, so putting gradients into other buckets changes no bit. For
powers of two it is the order of :func:`samestep.topology.tree_sum`, in which virtual ranks are added.

Source: R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of Collective Communication Operations in MPICH",
IJHPCA 19, 2005.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from samestep.collectives.plan import Plan
from samestep.network.messages import Ints, Messages, send


def all_reduce(ranks: int) -> Plan:
    """Returns the plan by which all ranks end with the sum.

    >>> [len(all_reduce(ranks).rounds) for ranks in (1, 2, 4, 7, 8)]
    [0, 1, 2, 4, 3]
    """
    return Plan("recursive doubling", "all_reduce", ranks, 1, lambda: _rounds(ranks))


def _rounds(ranks: int) -> Iterator[Messages]:
    """[1], [2], ...: with the rank that differs in one bit, from the lowest bit up."""
    members, idle = fold(ranks)
    yield from gather_idle(idle)
    place = np.arange(len(members))
    for bit in range(len(members).bit_length() - 1):
        yield send(members, members[place ^ (1 << bit)], adds=True)
    yield from scatter_idle(idle)


def fold(ranks: int) -> tuple[Ints, Ints]:
    """Returns the ranks that go on, a power of two of them, and those that sit out, each behind one that goes on.

        7 ranks      0 ◀─ 1     2 ◀─ 3     4 ◀─ 5     6          before: 1, 3 and 5 send everything, then wait
        members      0          1          2          3          4 of them go through the algorithm
                     0 ─▶ 1     2 ─▶ 3     4 ─▶ 5     6          after: 1, 3 and 5 are sent the result

    Source: R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of Collective Communication Operations in MPICH",
    IJHPCA 19, 2005.

    >>> [each.tolist() for each in fold(7)]
    [[0, 2, 4, 6], [1, 3, 5]]
    """
    extra = ranks - (1 << (ranks.bit_length() - 1))
    return np.r_[0 : 2 * extra : 2, 2 * extra : ranks], np.arange(1, 2 * extra, 2)


def gather_idle(idle: Ints, begin: object = 0, width: int = 1, *, adds: bool = True) -> Iterator[Messages]:
    """Yields the round in which those that sit out send their blocks to those before them; none if all go on."""
    if len(idle):
        yield send(idle, idle - 1, begin, width, adds=adds)


def scatter_idle(idle: Ints, begin: object = 0, width: int = 1) -> Iterator[Messages]:
    """Yields the round in which those that sit out are sent blocks; none if all go on."""
    if len(idle):
        yield send(idle - 1, idle, begin, width)
