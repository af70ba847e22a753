"""How a tensor lies in several files: cut in a grid, each cell in the file of the rank that wrote it. No torch here.

    bounds  [[0, 3, 5], [0, 4]]        0 ┌────────┐
    ranks   [0, 2]                       │ rank 0 │   tensors.safetensors
                                       3 ├────────┤
                                         │ rank 2 │   tensors-00002.safetensors
                                       5 └────────┘   a cell has the tensor's own name in its file

torch's distributed checkpoint lists boxes, and to find an overlap or a gap each has to be compared with many others,
which a stranger's list makes slow. A grid has neither, whatever its bounds. It loses nothing: a DTensor is cut along
each dim by itself, on a mesh of any number of axes, and what only one rank has is a grid of one cell.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

__all__: list[str] = []

PAYLOAD = "tensors.safetensors"


def file_of(rank: int) -> str:
    """Returns the name of the file that a rank writes."""
    return PAYLOAD if rank == 0 else f"tensors-{rank:05d}.safetensors"


@dataclass(frozen=True)
class Cell:
    """A box of a tensor.

    Attributes:
        offset: where it begins, in each dim.
        shape: how long it is.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]


def cells(grid: dict[str, Any]) -> list[Cell]:
    """Returns the cells of an entry of `Manifest.parts`, in the order of its ranks: the last dim runs first."""
    spans = [list(itertools.pairwise(bounds)) for bounds in grid["bounds"]]
    return [
        Cell(tuple(first for first, _ in box), tuple(last - first for first, last in box))
        for box in itertools.product(*spans)
    ]


def shape_of(grid: dict[str, Any], number: int) -> list[int]:
    """Returns the shape of one cell, without making the others."""
    shape = []
    for bounds in reversed(grid["bounds"]):
        if len(bounds) == 2:
            shape.append(bounds[1])
            continue
        number, at = divmod(number, len(bounds) - 1)
        shape.append(bounds[at + 1] - bounds[at])
    return shape[::-1]


def volumes(grid: dict[str, Any]) -> Iterator[int]:
    """Yields how many numbers each cell has."""
    lengths = [[last - first for first, last in itertools.pairwise(bounds)] for bounds in grid["bounds"]]
    return map(math.prod, itertools.product(*lengths))


def through(boxes: Iterable[Cell], shape: Sequence[int]) -> list[list[int]] | None:
    """Returns the bounds of the grid of which `boxes` are the cells; None where they overlap, or leave a gap."""
    boxes = set(boxes)
    edges = [sorted({box.offset[dim] for box in boxes} | {length}) for dim, length in enumerate(shape)]
    found = {"bounds": edges}
    fits = all(map(_is_cut, edges, shape)) and math.prod(len(each) - 1 for each in edges) == len(boxes)
    return edges if fits and set(cells(found)) == boxes else None


def is_grid(grid: Any, shape: Sequence[int], files: Collection[str]) -> bool:
    """Whether an entry of a manifest is a grid over a tensor of this shape, its cells in different ones of `files`."""
    if not isinstance(grid, dict) or grid.keys() != {"bounds", "ranks"}:
        return False
    bounds, ranks = grid["bounds"], grid["ranks"]
    if not isinstance(bounds, list) or not isinstance(ranks, list) or len(bounds) != len(shape):
        return False
    if not all(map(_is_cut, bounds, shape)) or math.prod(len(each) - 1 for each in bounds) != len(ranks):
        return False
    if not all(type(rank) is int and rank >= 0 for rank in ranks) or len(set(ranks)) != len(ranks):
        return False
    return all(file_of(rank) in files for rank in ranks)


def _is_cut(bounds: Any, length: int) -> bool:
    """Whether these are ascending numbers from 0 to `length`."""
    if not isinstance(bounds, list) or len(bounds) < 2 or not all(type(bound) is int for bound in bounds):
        return False
    return bounds[0] == 0 and bounds[-1] == length and all(first < last for first, last in itertools.pairwise(bounds))
