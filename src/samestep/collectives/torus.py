"""2-D torus: rings along the rows of a grid, then along its columns; every hop is to a neighbour.

2 rows of 3 ranks, wired in both directions and round the edges:

    [1] reduce-scatter along rows      [2] all-reduce along columns       [3] all-gather along rows
        0 ─▶ 1 ─▶ 2 ─▶ (0)                 0     1     2                      0 ─▶ 1 ─▶ 2 ─▶ (0)
        3 ─▶ 4 ─▶ 5 ─▶ (3)                 ▼     ▼     ▼                      3 ─▶ 4 ─▶ 5 ─▶ (3)
                                           3     4     5
                                          (0)   (1)   (2)

A rank uses one of its four cables at a time. With `parts=4` the buffer is quartered, and each quarter goes its own way:

    quarter    0 rows first, forwards       1 columns first, forwards       2 and 3 the same backwards

Cost on a x b ranks: 2 (a+b-2) alpha + 2 (p-1)/p n beta + (p-1)/p n gamma; with 4 parts over 4 ports, and a = b, a
quarter of the bandwidth term. It is a hierarchy without a slow level, and needs far fewer rounds than one ring.

Bits: as in a ring, one rank finishes each block and the others are sent copies.

Source: H. Mikami et al., "Massively Distributed SGD: ImageNet/ResNet-50 Training in a Flash", arXiv:1811.05233, 2018;
for the quarters, P. Sack and W. Gropp, "Collective algorithms for multiported torus networks", ACM TOPC 1, 2015.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import zip_longest
from typing import cast

import numpy as np

from samestep.collectives import ring
from samestep.collectives.hierarchical import two_levels
from samestep.collectives.plan import Plan
from samestep.errors import UsageError
from samestep.network.messages import Ints, MessageRound, Messages, remap, send


def all_reduce(rows: int, columns: int, parts: int = 1) -> Plan:
    """Returns the plan by which all ranks end with the sum; rank r stands in row r / columns, column r % columns.

    Args:
        rows: of the grid.
        columns: of the grid.
        parts: 1, 2 or 4 directions in which the buffer goes at once.

    Raises:
        UsageError: a grid without ranks, or another number of parts.

    Example:
        >>> plan = all_reduce(2, 3)
        >>> plan.name, plan.blocks, len(plan.rounds)
        ('torus 2x3', 6, 6)
    """
    grid = _grid(rows, columns)
    if parts not in {1, 2, 4}:
        raise UsageError(f"a torus cut into {parts} parts: give 1, 2 or 4")
    directions = [grid, grid.T, grid[::-1, ::-1], grid.T[::-1, ::-1]][:parts]

    def rounds() -> Iterator[Messages]:
        each = [
            two_levels(lines, ring.all_reduce(len(lines)), number * grid.size)
            for number, lines in enumerate(directions)
        ]
        yield from each[0] if parts == 1 else in_parallel(each)

    name = f"torus {rows}x{columns}" + (f" in {parts} directions" if parts > 1 else "")
    return Plan(name, "all_reduce", grid.size, parts * grid.size, rounds)


def reduce_scatter(rows: int, columns: int) -> Plan:
    """Returns the plan by which rank r ends with block r of the sum: along columns, then along rows."""
    grid = _grid(rows, columns)

    def rounds() -> Iterator[Messages]:
        yield from remap(ring.scatter(rows), grid.T, scale=columns)
        yield from remap(ring.scatter(columns), grid, grid[:, 0])

    return Plan(f"torus {rows}x{columns}", "reduce_scatter", grid.size, grid.size, rounds)


def all_gather(rows: int, columns: int) -> Plan:
    """Returns the plan by which all ranks end with block r of rank r, for every r: along rows, then along columns."""
    grid = _grid(rows, columns)

    def rounds() -> Iterator[Messages]:
        yield from remap(ring.gather(columns), grid, grid[:, 0])
        yield from remap(ring.gather(rows), grid.T, scale=columns)

    return Plan(f"torus {rows}x{columns}", "all_gather", grid.size, grid.size, rounds)


def in_parallel(several: Iterable[Iterable[Messages]]) -> Iterator[MessageRound]:
    """Yields the first rounds of all as one round, then the second rounds, and so on; repeats are written out."""
    single = [[(one, t) for one in rounds for t in range(one.repeat)] for rounds in several]
    for together in zip_longest(*single):
        on = [(cast("MessageRound", pair[0]), pair[1]) for pair in together if pair]
        arrays = zip(*((one.sources, one.targets, one.begin(t), one.width, one.adds) for one, t in on), strict=True)
        sources, targets, begin, width, adds = map(np.concatenate, arrays)
        yield send(sources, targets, begin, width, adds=adds)


def _grid(rows: int, columns: int) -> Ints:
    if rows < 1 or columns < 1:
        raise UsageError(f"a torus of {rows} rows and {columns} columns: give 1 or more of each")
    return np.arange(rows * columns).reshape(rows, columns)
