"""Real checkpoints for tests to damage: model, optimizer and data of a training, saved after its steps."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

import samestep

BATCH = 4  # of 16 samples: four steps an epoch


def a_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Linear(40, 3))


def train(path, *, seed=0, steps=3, every=1, keep=3):
    """Trains up to `steps` steps in all, saving after each; returns (resumed, step at the start, model)."""
    data = TensorDataset(torch.arange(16 * 5, dtype=torch.float32).view(16, 5) / 80)
    with samestep.world(device="cpu") as world:
        model = a_model(seed)
        optimizer = torch.optim.AdamW(model.parameters())
        batches = samestep.shards(data, world, batch_size=BATCH, seed=seed)
        state = samestep.checkpoint(path, world, every=every, keep=keep, model=model, optimizer=optimizer, data=batches)
        start = (bool(state.resumed), state.step)
        for _ in state.epochs(1 + steps // 4):
            for (x,) in batches:
                if state.step >= steps:
                    break
                batches.mean(model(x).square().sum(1)).backward()
                optimizer.step()
                optimizer.zero_grad()
                state.commit()
            if state.step >= steps:
                break
    return *start, model
