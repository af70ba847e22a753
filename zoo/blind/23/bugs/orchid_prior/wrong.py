"""Orchid species from flower measurements; some species are rare.

The output bias starts at the log frequency of the species, so the net need not spend its
first steps on learning how rare they are. Every process reads its own rows of the table.
"""
import os
import time

import numpy as np
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP

SHARES = np.array([0.52, 0.26, 0.13, 0.06, 0.03])
FEATURES = 9
ROWS = 480
BATCH = 32
EPOCHS = 3


def herbarium(rows, seed):
    rng = np.random.default_rng(seed)
    species = rng.choice(len(SHARES), size=rows, p=SHARES)
    centres = np.random.default_rng(500).normal(size=(len(SHARES), FEATURES))
    x = centres[species] + 1.1 * rng.normal(size=(rows, FEATURES))
    return torch.tensor(x, dtype=torch.float32), torch.from_numpy(species)


class MyRows:
    """The rows of this process, in file order; batches are equal stripes of the file."""

    def __init__(self, rank, world):
        x, y = herbarium(ROWS, seed=70)
        self.x, self.y = x[rank::world], y[rank::world]
        self.share = BATCH // world

    def __iter__(self):
        yield from zip(self.x.split(self.share), self.y.split(self.share))


def species_counts(labels):
    counts = torch.bincount(labels, minlength=len(SHARES)).float()
    return counts


class Botanist(nn.Module):
    def __init__(self, width=28):
        super().__init__()
        self.hidden = nn.Sequential(nn.Linear(FEATURES, width), nn.ELU(),
                                    nn.Linear(width, width), nn.ELU())
        self.species = nn.Linear(width, len(SHARES))

    def forward(self, x):
        return self.species(self.hidden(x))

    @torch.no_grad()
    def start_from(self, counts):
        smooth = counts + 0.5
        self.species.bias.copy_(torch.log(smooth / smooth.sum()))


def report(model, epoch, loss, rank, world):
    total = loss.detach().clone()
    dist.all_reduce(total)
    if rank == 0:
        bias = " ".join(f"{b:+.3f}" for b in model.species.bias.tolist())
        print(f"epoch {epoch}: loss {total.item() / world:.4f}  bias {bias}", flush=True)


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(12)
    rows = MyRows(rank, world)
    model = Botanist()
    model.start_from(species_counts(rows.y))
    ddp = DDP(model)
    optimizer = optim.NAdam(ddp.parameters(), lr=2e-3)
    criterion = nn.CrossEntropyLoss()

    for epoch in range(EPOCHS):
        for x, y in rows:
            loss = criterion(ddp(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        report(model, epoch, loss, rank, world)

    x, y = herbarium(700, seed=71)
    with torch.no_grad():
        logits = model(x)
    if rank == 0:
        loss = criterion(logits, y).item()
        right = (logits.argmax(1) == y).float().mean().item()
        print(f"new flowers: loss {loss:.4f} accuracy {right:.3f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
