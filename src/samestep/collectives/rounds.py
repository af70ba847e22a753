"""Rounds made of rounds: a root elsewhere, a number of ranks brought down to a power of two, several at once.

With :func:`samestep.network.messages.reverse` and :func:`samestep.network.messages.remap`: a reduce is a broadcast
run backwards, a torus is rings on its rows and columns. Each algorithm's file says only what is its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import zip_longest
from typing import cast

import numpy as np

from samestep.network.messages import Ints, MessageRound, Messages, remap, send


def with_root(rounds: Iterable[Messages], ranks: int, root: int) -> Iterator[Messages]:
    """Yields the rounds with rank 0 played by `root`, and every other by the rank as far behind it."""
    return remap(rounds, (np.arange(ranks) + root) % ranks)


def in_parallel(several: Iterable[Iterable[Messages]]) -> Iterator[MessageRound]:
    """Yields the first rounds of all as one round, then the second rounds, and so on; repeats are written out."""
    single = [[(one, t) for one in rounds for t in range(one.repeat)] for rounds in several]
    for together in zip_longest(*single):
        on = [(cast("MessageRound", pair[0]), pair[1]) for pair in together if pair]
        arrays = zip(*((one.sources, one.targets, one.begin(t), one.width, one.adds) for one, t in on), strict=True)
        sources, targets, begin, width, adds = map(np.concatenate, arrays)
        yield send(sources, targets, begin, width, adds=adds)


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
