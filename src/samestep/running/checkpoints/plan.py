"""Who writes what: every rank tells what it holds, and all come to the same plan. No torch here.

    rank 0   a [0:3]  b (copy)           a   rank 0 writes [0:3], rank 1 writes [3:5]
    rank 1   a [3:5]  b (copy)           b   the one of both that has less to write

What only one rank holds it writes. A box that several hold (Replicate) goes to the one that has least to write so far,
the largest first, so that no rank waits long for another.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from samestep.errors import CheckpointError
from samestep.running.checkpoints.grid import Cell, cells, through
from samestep.running.checkpoints.manifest import ITEM_BYTES

__all__: list[str] = []


@dataclass(frozen=True)
class Report:
    """What one rank holds of tensors that are cut among the ranks.

    Attributes:
        names: under which they are saved; those of the first rank count.
        forms: name -> {"dtype", "shape"} of the whole tensor, at every place, tied ones too.
        boxes: name -> [offset, shape] of what this rank holds; without those of which it holds nothing.
        other: bytes of what is not cut, which the first rank writes.
    """

    names: list[str]
    forms: dict[str, dict[str, Any]] = field(default_factory=dict)
    boxes: dict[str, list[list[int]]] = field(default_factory=dict)
    other: int = 0


def planned(reports: Sequence[Report]) -> dict[str, dict[str, Any]]:
    """Returns the entries of `Manifest.parts`, from the reports of all ranks in their order.

    What the first rank writes whole is no part, and has none.

    Raises:
        CheckpointError: the ranks hold different tensors under one name, or not the whole of one.
    """
    names, forms = reports[0].names, reports[0].forms
    for rank, report in enumerate(reports):
        if lost := [name for name in report.names if name not in forms]:
            raise CheckpointError(f"cannot save {lost[0]}: it is cut on rank {rank}, and rank 0 has no such tensor")
    holders = {name: _holders(name, forms[name], reports) for name in names}
    writers = _dealt(holders, forms, [reports[0].other, *[0] * (len(reports) - 1)])
    found = {}
    for name, of in writers.items():
        bounds = through(of, forms[name]["shape"])
        if bounds is None:
            raise CheckpointError(
                f"cannot save {name}: what the ranks hold of its shape {forms[name]['shape']} leaves a gap or overlaps"
            )
        ranks = [of[cell] for cell in cells({"bounds": bounds})]
        if ranks != [0]:
            found[name] = {"bounds": bounds, "ranks": ranks}
    return found


def _holders(name: str, form: dict[str, Any], reports: Sequence[Report]) -> dict[Cell, list[int]]:
    """The boxes of one tensor, each with the ranks that hold it; none of a tensor without elements."""
    found = defaultdict(list)
    for rank, report in enumerate(reports):
        if report.forms.get(name, form) != form:
            raise CheckpointError(f"cannot save {name}: rank {rank} holds {report.forms[name]}, rank 0 holds {form}")
        if name in report.boxes:
            offset, shape = report.boxes[name]
            found[Cell(tuple(offset), tuple(shape))].append(rank)
    return found


def _dealt(
    holders: dict[str, dict[Cell, list[int]]], forms: dict[str, dict[str, Any]], loads: list[int]
) -> dict[str, dict[Cell, int]]:
    """Each box with the rank that writes it. `loads` are the bytes of each rank before."""
    rows = [
        (len(ranks) > 1, -ITEM_BYTES[forms[name]["dtype"]] * math.prod(cell.shape), name, cell, ranks)
        for name, boxes in holders.items()
        for cell, ranks in boxes.items()
    ]
    found: dict[str, dict[Cell, int]] = {name: {} for name, boxes in holders.items() if boxes}
    for _, size, name, cell, ranks in sorted(rows, key=lambda row: row[:2]):
        rank = min(ranks, key=lambda rank: (loads[rank], rank))
        found[name][cell] = rank
        loads[rank] -= size
    return found
