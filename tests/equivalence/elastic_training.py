"""A training that is killed where it is told to be, and that notes what every rank has used, and what came of it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import samestep

SAMPLES, BATCH, EPOCHS = 41, 8, 3  # a last step of one sample: most ranks have none in it
STEPS_PER_EPOCH = 6
STEPS = EPOCHS * STEPS_PER_EPOCH


def a_dataset():
    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 6, generator=draw, dtype=torch.float64)
    return torch.utils.data.TensorDataset(
        inputs, torch.randint(0, 3, (SAMPLES,), generator=draw), torch.arange(SAMPLES)
    )


def train(folder, life, workers, micro, every, death):
    """Trains to the end, or to the `death` of one rank: its number, a step, and whether before or behind its commit."""
    folder = Path(folder)
    with samestep.world(device="cpu") as world:
        note = Notes(folder / f"life{life}-rank{world.rank}")
        model = samestep.replicate(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double(), world)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        batches = samestep.shards(a_dataset(), world, batch_size=BATCH, micro_batch_size=micro, workers=workers, seed=3)
        objects = {"model": model, "optimizer": optimizer, "schedule": schedule, "data": batches}
        state = samestep.checkpoint(folder / "run", world, every=every, **objects)
        note(resumed=state.step)

        def die(place):
            if death == [world.rank, state.step, place]:
                os.kill(os.getpid(), signal.SIGKILL)

        for _ in state.epochs(EPOCHS):
            for x, y, index in batches:
                note(step=state.step, used=index.tolist())
                batches.mean(F.cross_entropy(model(x), y, reduction="none")).backward()
                if batches.step_ends:
                    die("before")
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                    state.commit()
                    note(step=state.step - 1, loss=batches.loss)
                    die("behind")
        weights = [value for parameter in model.parameters() for value in parameter.flatten().tolist()]
        note(weights=weights, data=batches.state_dict())


class Notes:
    """Lines that are there even if the next thing is a kill."""

    def __init__(self, path):
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def __call__(self, **note):
        os.write(self._file, json.dumps(note).encode() + b"\n")
