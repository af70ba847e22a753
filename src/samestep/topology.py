"""Ranks and their coordinates on the named axes of the world: integers only, no process group.

Pipeline is the fast axis, so that neighbouring stages are neighbouring ranks and meet on one host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

from samestep.errors import UsageError


@dataclass(frozen=True)
class Grid:
    """`size` ranks laid out as `size / pipeline` replicas of `pipeline` stages."""

    size: int
    pipeline: int = 1

    def __post_init__(self) -> None:
        if self.pipeline < 1 or self.size % self.pipeline:
            raise UsageError(
                f"a world of {self.size} cannot be cut into pipelines of {self.pipeline}: "
                f"the number of ranks must be a multiple of the number of stages"
            )

    @classmethod
    def of(cls, size: int, stages: int) -> Self:
        """Returns that of `size` ranks for pipelines of so many stages; one rank alone holds all stages.

        >>> Grid.of(8, 2).pipeline, Grid.of(1, 2).pipeline
        (2, 1)
        """
        return cls(size, min(stages, 1) if size == 1 else stages)

    def coordinates(self, rank: int) -> tuple[int, int]:
        """Returns (position on the data axis, position on the pipeline axis)."""
        return divmod(rank, self.pipeline)

    def data_ranks(self, rank: int) -> tuple[int, ...]:
        """Returns the ranks that hold the same stage as `rank`, in order."""
        return tuple(range(rank % self.pipeline, self.size, self.pipeline))

    def pipeline_ranks(self, rank: int) -> tuple[int, ...]:
        """Returns the ranks that hold the stages of the replica of `rank`, in order."""
        first = rank - rank % self.pipeline
        return tuple(range(first, first + self.pipeline))

    def rows(self) -> list[tuple[int, ...]]:
        """Returns the pipeline groups of the whole world, in order."""
        return [self.pipeline_ranks(rank) for rank in range(0, self.size, self.pipeline)]

    def columns(self) -> list[tuple[int, ...]]:
        """Returns the data groups of the whole world, in order."""
        return [self.data_ranks(rank) for rank in range(self.pipeline)]


def cut_evenly(total: int, parts: int) -> list[tuple[int, int]]:
    """Returns `parts` contiguous slices [start, stop) of `total`, their lengths differing by at most one.

    >>> cut_evenly(7, 3)
    [(0, 3), (3, 5), (5, 7)]
    """
    short, longer = divmod(total, parts)
    edges = [part * short + min(part, longer) for part in range(parts + 1)]
    return list(pairwise(edges))


def is_power_of_two(number: int) -> bool:
    """Whether `number` is one of 1, 2, 4, 8 and so on."""
    return number > 0 and number & (number - 1) == 0


def tree_sum(values: Sequence[Any]) -> Any:
    """Returns the sum by pairs of neighbours, whatever can be added: numbers, arrays, tensors.

        0   1   2   3   4   5   6   7
        └─┬─┘   └─┬─┘   └─┬─┘   └─┬─┘      ranks that hold two, four, … of the values add up their own part of the
          └───┬───┘       └───┬───┘        tree, and the sum has the same bits on any power of two of them; from left
              └───────┬───────┘            to right it would depend on where the parts are

    >>> tree_sum([1.0, 1e100, 1.0, -1e100])  # (1 + 1e100) + (1 - 1e100)
    0.0
    >>> tree_sum("abcde")
    'abcde'
    """
    level = list(values)
    while len(level) > 1:
        pairs = [level[at] + level[at + 1] for at in range(0, len(level) - 1, 2)]
        level = pairs + level[2 * len(pairs) :]
    return level[0]
