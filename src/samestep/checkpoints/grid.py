"""How a tensor lies in several files: cut in a grid, each box in the file of the rank that wrote it. No torch here.

    bounds  [[0, 3, 5], [0, 4]]        0 ┌────────┐
    ranks   [0, 2]                       │ rank 0 │   tensors.safetensors
                                       3 ├────────┤
                                         │ rank 2 │   tensors-00002.safetensors
                                       5 └────────┘   a box has the tensor's own name in its file

A list of boxes would have to be searched for overlaps and gaps; a grid has neither. Every DTensor is a grid, because
it is cut along each dim by itself.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

PAYLOAD = "tensors.safetensors"


def file_of(rank: int) -> str:
    return PAYLOAD if rank == 0 else f"tensors-{rank:05d}.safetensors"


@dataclass(frozen=True)
class Box:
    offset: tuple[int, ...]  # where it begins, in each dim
    shape: tuple[int, ...]  # how long it is


def boxes(grid: dict[str, Any]) -> list[Box]:
    """Returns the boxes of an entry of `Manifest.parts`, in the order of its ranks: the last dim runs first."""
    spans = [list(itertools.pairwise(bounds)) for bounds in grid["bounds"]]
    return [
        Box(tuple(first for first, _ in box), tuple(last - first for first, last in box))
        for box in itertools.product(*spans)
    ]


def shape_of(grid: dict[str, Any], number: int) -> list[int]:
    shape = []
    for bounds in reversed(grid["bounds"]):
        if len(bounds) == 2:  # most dims; a stranger's manifest may have many of them
            shape.append(bounds[1])
            continue
        number, at = divmod(number, len(bounds) - 1)
        shape.append(bounds[at + 1] - bounds[at])
    return shape[::-1]


def grid_bounds(found: Iterable[Box], shape: Sequence[int]) -> list[list[int]] | None:
    """Returns the bounds of the grid that consists of these boxes; None where they overlap or leave a gap."""
    found = set(found)
    bounds = [sorted({box.offset[dim] for box in found} | {length}) for dim, length in enumerate(shape)]
    fits = all(map(_is_cut, bounds, shape)) and math.prod(len(each) - 1 for each in bounds) == len(found)
    return bounds if fits and set(boxes({"bounds": bounds})) == found else None


def is_grid(grid: Any, shape: Sequence[int], most_ranks: int) -> bool:
    """Whether an entry of a manifest is a grid over a tensor of this shape, its boxes on different ranks."""
    if not isinstance(grid, dict) or grid.keys() != {"bounds", "ranks"}:
        return False
    bounds, ranks = grid["bounds"], grid["ranks"]
    if not isinstance(bounds, list) or not isinstance(ranks, list) or len(bounds) != len(shape):
        return False
    if not all(map(_is_cut, bounds, shape)) or math.prod(len(each) - 1 for each in bounds) != len(ranks):
        return False
    return all(type(rank) is int and 0 <= rank < most_ranks for rank in ranks) and len(set(ranks)) == len(ranks)


def _is_cut(bounds: Any, length: int) -> bool:
    """Whether these are ascending numbers from 0 to `length`."""
    if not isinstance(bounds, list) or len(bounds) < 2 or not all(type(bound) is int for bound in bounds):
        return False
    return bounds[0] == 0 and bounds[-1] == length and all(first < last for first, last in itertools.pairwise(bounds))
