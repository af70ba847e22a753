"""Each rank's share of a save: what it holds of the state, and what of that it writes.

A state that no tensor of is cut among the ranks is rank 0's alone. To find that out costs one small exchange a save:
the digest of what each rank holds of cut tensors. Only where one is new do they tell each other all of it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samestep.running.checkpoints.format import Encoder
from samestep.running.checkpoints.letters import Letters
from samestep.running.checkpoints.plan import Report, planned
from samestep.running.checkpoints.sharded import is_sharded, local_boxes
from samestep.running.checkpoints.writer import Others, describe, write_share
from samestep.runtime.exchange import all_gather_json
from samestep.runtime.world import World

__all__: list[str] = []


class Holding:
    """What this rank holds of an encoded state. Tensors may be added to the encoder's meanwhile, whole ones.

    Attributes:
        report: what the others are told.
    """

    def __init__(self, encoder: Encoder) -> None:
        self._tensors = encoder.tensors
        self._boxes = local_boxes(encoder.sharded)
        self.report = Report(
            names=[name for name in self._tensors if name in encoder.sharded],
            forms={name: describe(tensor) for name, tensor in encoder.sharded.items()},
            boxes={name: [list(cell.offset), list(cell.shape)] for name, (cell, _) in self._boxes.items()},
            other=sum(one.nbytes for name, one in self._tensors.items() if name not in encoder.sharded),
        )

    def described(self) -> dict[str, dict[str, Any]]:
        """Returns the table of whole tensors for the manifest."""
        return {name: describe(tensor) for name, tensor in self._tensors.items()}

    def share(self, parts: dict[str, dict[str, Any]], rank: int) -> dict[str, Tensor]:
        """Returns what a rank, this one, writes: its cells, and the first also what is no part."""
        mine = {name: self._boxes[name][1] for name, grid in parts.items() if rank in grid["ranks"]}
        if rank == 0:
            mine |= {name: self._whole(name) for name in self._tensors if name not in parts}
        return mine

    def _whole(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        if not is_sharded(tensor):
            return tensor
        return self._boxes[name][1] if name in self._boxes else torch.empty(tensor.shape, dtype=tensor.dtype)


class Shares:
    """What the ranks of a run have agreed on.

    Attributes:
        about: names their letters; no other checkpoint of this process bears it.
    """

    def __init__(self, world: World) -> None:
        self.about = ""
        self._world = world
        self._known = [""] * world.size
        self._parts: dict[str, dict[str, Any]] = {}
        self._letters: Letters | None = None
        self._saves = 0

    def plan(self, holding: Holding) -> dict[str, dict[str, Any]]:
        """Returns the entries of `Manifest.parts`, alike on all ranks. Collective.

        Raises:
            CheckpointError: on every rank, if what they hold is no whole.
        """
        known = all_gather_json(self._world.everyone, _digest(holding.report))
        if known != self._known:
            told = all_gather_json(self._world.everyone, vars(holding.report))
            self._parts = planned([Report(**each) for each in told])
            self._known = known
        return self._parts

    def post(self, folder: Path, writers: list[int], held: dict[str, Tensor]) -> tuple[Others, Callable[[], Path]]:
        """Returns what the first rank knows of the others in the next save, and what such another one does in it."""
        self._saves += 1
        number, rank = self._saves, self._world.rank
        letters = self._letters = self._letters or Letters(rank, self.about)

        def write() -> Path:
            letters.send(number, lambda: write_share(folder, rank, held))
            return folder

        return Others(folder, lambda: letters.collect(number, writers)), write

    def hurry(self) -> None:
        """Lets the save under way give up soon on ranks that are silent."""
        if self._letters is not None:
            self._letters.hurry()


def _digest(report: Report) -> str:
    """Empty where no tensor is cut: there is nothing to tell."""
    return hashlib.sha256(json.dumps(vars(report)).encode()).hexdigest() if report.forms else ""
