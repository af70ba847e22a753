"""Binomial tree: each rank that has it sends it on, so that twice as many have it after every round.

8 ranks, broadcast from rank 0; a reduce is the same backwards, every arrow turned and added:

    0 ──────────────[1]─────────────▶ 4
    0 ──────[2]─────▶ 2               4 ──────[2]─────▶ 6
    0 ─[3]─▶ 1        2 ─[3]─▶ 3      4 ─[3]─▶ 5        6 ─[3]─▶ 7

Distances halve, so neighbours come last in a broadcast and first in a reduce: one message for each other host.

Cost: ceil(log2 p) (alpha + n beta), for a reduce + n gamma each; an all-reduce is a reduce and a broadcast.

Bits: the root finishes everything and the others are sent copies. All elements are added in the same order,
that of :func:`samestep.topology.tree_sum` for any number of ranks (root 0).

Source: R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of Collective Communication Operations in MPICH",
IJHPCA 19, 2005.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from samestep.collectives.plan import Plan
from samestep.network.messages import Messages, reverse, send, with_root


def broadcast(ranks: int, root: int = 0) -> Plan:
    """Returns the plan by which all ranks end with what `root` has.

    >>> len(broadcast(8).rounds), len(broadcast(9, root=4).rounds)
    (3, 4)
    """
    return Plan("binomial tree", "broadcast", ranks, 1, lambda: spread(ranks, root), root)


def reduce(ranks: int, root: int = 0) -> Plan:
    """Returns the plan by which `root` ends with the sum; the others are left with parts of it."""
    return Plan("binomial tree", "reduce", ranks, 1, lambda: reverse(spread(ranks, root)), root)


def all_reduce(ranks: int) -> Plan:
    """Returns the plan by which all ranks end with the sum.

    >>> len(all_reduce(8).rounds)
    6
    """
    return Plan("binomial tree", "all_reduce", ranks, 1, lambda: [*reverse(spread(ranks)), *spread(ranks)])


def spread(ranks: int, root: int = 0) -> Iterator[Messages]:
    """Yields [1], [2], [3]: from every rank that has it to the one `distance` further on, if there is one."""
    for bit in reversed(range((ranks - 1).bit_length())):
        near = np.arange(0, ranks - (1 << bit), 2 << bit)
        yield from with_root([send(near, near + (1 << bit))], ranks, root)
