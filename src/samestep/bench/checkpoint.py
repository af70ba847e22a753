"""What saving costs the training: a window of steps with one save in it, beside the same window without.

    with      ─step─step─[copy]step─step─step─step─step─step─│ wait for the write to end
    without   ─step─step───────step─step─step─step─step─step─│

The difference holds everything: the copy, the processor time and memory traffic of the thread that writes, hashes,
syncs and reads back, and the wait, if the write outlasts the window. It is told as the minute of training that one
save a minute makes longer. The second line is what the training stands still for, beside `torch.save` of the same
state (the model's and Adam's) with a sync and a rename: what scripts do by hand.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.nn import functional as F

import samestep
from samestep.bench.harness import Comparison, Options, Report, interleave
from samestep.bench.workloads import MLP
from samestep.launch.functions.spawn import spawn
from samestep.runtime.world import World

PROMISE = 1.02  # at most 2 % of a minute with one save in it
MINUTE = 60.0
STEPS = 60  # in a window: longer than a write takes


def run(options: Options) -> Report:
    with TemporaryDirectory(dir=".", prefix=".bench-") as folder:  # where checkpoints would go, not in memory
        found = spawn(compare, options.ranks, options.repeats, str(Path(folder).resolve()), progress=False)[0]
    minutes = [MINUTE + longer - shorter for longer, shorter in zip(found["with"], found["without"], strict=True)]
    comparisons = [
        Comparison("a minute with one save / without", "minute", minutes, [MINUTE] * len(minutes), PROMISE),
        Comparison("standing still for a save / torch.save, synced", "save", found["still"], found["by_hand"]),
    ]
    return Report("checkpoint", comparisons, found["setting"])


def compare(pairs: int, folder: str, steps: int = STEPS) -> dict[str, Any]:
    """Runs on every rank; returns seconds of windows with and without a save, and of the stops. Collective."""
    with samestep.world(device="cpu") as world:
        training = Training(world, folder, steps)
        training.window(save=True)
        windows = (lambda: training.window(save=True), lambda: training.window(save=False))
        with_save, without = interleave(*windows, pairs=pairs)
        by_hand = [training.save_by_hand(Path(folder) / "by-hand.pt") for _ in range(pairs)]
        setting = {
            "ranks": world.size,
            "torch": str(torch.__version__),
            "steps": steps,
            "megabytes": round(training.bytes / 1e6, 1),
        }
        return {
            "with": with_save,
            "without": without,
            "still": training.still[1:],
            "by_hand": by_hand,
            "setting": setting,
        }


class Training:
    """A training whose steps are windows apart."""

    def __init__(self, world: World, folder: str, steps: int) -> None:
        self.world = world
        self.steps = steps
        self.model = samestep.replicate(MLP.network(), world)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.batches = samestep.shards(MLP.dataset(), world, batch_size=MLP.batch * world.size)
        self.state = samestep.checkpoint(Path(folder) / "ours", world, model=self.model, optimizer=self.optimizer)
        self.still: list[float] = []  # seconds that the training stood still for each save
        self._steps = self._train()

    @property
    def bytes(self) -> int:
        return 3 * sum(parameter.numel() * parameter.element_size() for parameter in self.model.parameters())

    def _train(self) -> Iterator[None]:
        while True:
            for x, y in self.batches:
                self.batches.mean(F.cross_entropy(self.model(x), y, reduction="none")).backward()  # type: ignore[no-untyped-call]
                if self.batches.step_ends:
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                    self.state.commit()
                    yield

    def window(self, *, save: bool) -> float:
        self.world.barrier()
        began = time.perf_counter()
        for number in range(self.steps):
            next(self._steps)
            if save and number == 1:
                before = time.perf_counter()
                self.state._begin_save()  # noqa: SLF001  (what commit() does when a save is due)
                self.still.append(time.perf_counter() - before)
        if save:
            self.state.wait()
        return time.perf_counter() - began

    def save_by_hand(self, path: Path) -> float:
        """Returns the seconds that rank 0 takes to save by itself while the others wait."""
        self.world.barrier()
        began = time.perf_counter()
        if self.world.is_first:
            draft = path.with_suffix(".tmp")
            torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, draft)
            with draft.open("rb") as file:
                os.fsync(file.fileno())
            draft.replace(path)
        self.world.barrier()
        return time.perf_counter() - began
