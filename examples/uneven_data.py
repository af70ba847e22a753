"""Sizes that divide by nothing: 1,797 digits, steps of 50, three ranks. Whose training is it?

    step of 50   rank 0: 17   rank 1: 17   rank 2: 16        the last step has 47: 16, 16, 15

    mean of means   (mean of 17 + mean of 17 + mean of 16) / 3      a sample of rank 2 weighs more
    by the sum      (sum of 17 + sum of 17 + sum of 16) / 50        all weigh the same: one process's mean

samestep run -n 3 examples/uneven_data.py

First by hand, with the same slices: a mean on each rank, which DistributedDataParallel averages; then each rank's sum,
times the ranks (for that average divides by them), by the samples of the step. Then samestep, where `batches.mean` is
the second. DistributedSampler would deal out 1,797 + 0 to 2 samples, repeating some, and cut other steps.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import samestep

STEP = 50


def training(wrap=lambda model: model):
    """Returns the same model every time, wrapped, and its optimizer."""
    torch.manual_seed(3)
    model = wrap(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).double())
    return model, torch.optim.SGD(model.parameters(), lr=0.2)


def sliced(x, y, rank, size, loss_of, wrap=lambda model: model):
    """Trains one epoch on this rank's slice of every step."""
    model, optimizer = training(wrap)
    for part, targets in zip(x.split(STEP), y.split(STEP), strict=True):
        mine, own = part.tensor_split(size)[rank], targets.tensor_split(size)[rank]
        optimizer.zero_grad()
        loss_of(model(mine), own, len(part)).backward()
        optimizer.step()
    return model


def summed(outputs, targets):
    """Returns the sum of a slice's losses; 0 if it is empty."""
    return F.cross_entropy(outputs, targets, reduction="sum")


def with_samestep(x, y, world):
    """Trains the same epoch on shards."""
    model, optimizer = training(lambda model: samestep.replicate(model, world))
    batches = samestep.shards(TensorDataset(x, y), world, batch_size=STEP, shuffle=False)
    for part, targets in batches:
        optimizer.zero_grad()
        batches.mean(F.cross_entropy(model(part), targets, reduction="none")).backward()
        optimizer.step()
    return model


def main():
    """Trains three ways, and compares each with one process."""
    data = load_digits()
    x, y = torch.tensor(data.data) / 16, torch.tensor(data.target)
    with samestep.world() as world:
        rank, size, ddp = world.rank, world.size, DistributedDataParallel
        alone = sliced(x, y, 0, 1, lambda outputs, targets, _: F.cross_entropy(outputs, targets))
        ways = {
            "mean of means": sliced(x, y, rank, size, lambda o, t, _: F.cross_entropy(o, t), ddp),
            "by the sum": sliced(x, y, rank, size, lambda o, t, n: summed(o, t) * size / n, ddp),
            "samestep": with_samestep(x, y, world),
        }
        for name, model in ways.items():
            apart = max((a - b).abs().max().item() for a, b in zip(model.parameters(), alone.parameters(), strict=True))
            if world.is_first:
                print(f"{name:14} weights at most {apart:.1e} from those of one process")


if __name__ == "__main__":
    main()
