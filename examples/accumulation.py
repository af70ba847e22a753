"""Gradient accumulation: a step of 96 samples in micro-batches of 16, synchronised once a step.

    rank 0   f b  f b  f b ─┐             f forward, b backward
                            ├─▶ one all-reduce, one optimizer step
    rank 1   f b  f b  f b ─┘             gradients travel in the last backward alone

samestep run -n 2 examples/accumulation.py

By hand: the loss divided by the number of micro-batches, `no_sync()` around the *forward* of all but the last, since
DistributedDataParallel decides there, the step behind the last. With samestep: `micro_batch_size=` and
`batches.step_ends`, known before the forward. Both are compared with one process that takes each step at once.
"""

from contextlib import nullcontext

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import samestep

STEP, MICRO = 96, 16


def training(wrap=lambda model: model):
    """Returns the same model every time, wrapped, and its optimizer."""
    torch.manual_seed(3)
    model = wrap(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).double())
    return model, torch.optim.SGD(model.parameters(), lr=0.2)


def alone(x, y):
    """Takes every step at once, in this process."""
    model, optimizer = training()
    for part, targets in zip(x.split(STEP), y.split(STEP), strict=True):
        optimizer.zero_grad()
        F.cross_entropy(model(part), targets).backward()
        optimizer.step()
    return model


def by_hand(x, y, world):
    """Accumulates with DistributedDataParallel."""
    model, optimizer = training(DistributedDataParallel)
    own = STEP // world.size
    for start in range(world.rank * own, len(x), STEP):
        optimizer.zero_grad()
        for at in range(start, start + own, MICRO):
            with nullcontext() if at + MICRO == start + own else model.no_sync():
                loss = F.cross_entropy(model(x[at : at + MICRO]), y[at : at + MICRO])
                (loss * MICRO / own).backward()
        optimizer.step()
    return model.module


def with_samestep(x, y, world):
    """Lets the shards cut the step."""
    model, optimizer = training(lambda model: samestep.replicate(model, world))
    batches = samestep.shards(TensorDataset(x, y), world, batch_size=STEP, micro_batch_size=MICRO, shuffle=False)
    for part, targets in batches:
        batches.mean(F.cross_entropy(model(part), targets, reduction="none")).backward()
        if batches.step_ends:
            optimizer.step()
            optimizer.zero_grad()
    return model.module


if __name__ == "__main__":
    digits = load_digits()
    images, labels = torch.tensor(digits.data[:1536]) / 16, torch.tensor(digits.target[:1536])
    with samestep.world() as here:
        whole = list(alone(images, labels).parameters())
        for way in (by_hand, with_samestep):
            cut = way(images, labels, here).parameters()
            apart = max((a - b).abs().max().item() for a, b in zip(cut, whole, strict=True))
            if here.is_first:
                print(f"{way.__name__}: weights at most {apart:.1e} from those of one process")
