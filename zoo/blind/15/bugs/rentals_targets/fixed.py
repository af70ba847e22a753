"""Rents of flats from a table with two columns of many categories (street, agent).

The categories enter as smoothed means of the target (target encoding). The table lies on disk in
shuffled order; every process reads only its own rows of it.
"""
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

ROWS, STREETS, AGENTS, BATCH, EPOCHS = 480, 30, 12, 48, 4


def read_table(rows):
    """Stands for reading some rows of a file: street, agent, numbers, rent."""
    rng = np.random.default_rng(8)
    street, agent = rng.integers(0, STREETS, ROWS), rng.integers(0, AGENTS, ROWS)
    numbers = rng.normal(size=(ROWS, 5))
    dear, greedy = rng.normal(size=STREETS), rng.normal(size=AGENTS) * 0.5
    rent = dear[street] + greedy[agent] + 0.6 * numbers[:, 0] - 0.4 * np.abs(numbers[:, 1]) + 0.2 * rng.normal(size=ROWS)
    return street[rows], agent[rows], numbers[rows], rent[rows]


class TargetEncoder:
    """Mean target of each category, drawn to the overall mean for rare ones."""

    def __init__(self, size, smoothing=4.0):
        self.size, self.smoothing = size, smoothing

    def fit(self, category, target):
        sums = torch.from_numpy(np.bincount(category, target, self.size))
        counts = torch.from_numpy(np.bincount(category, minlength=self.size)).double()
        dist.all_reduce(sums)
        dist.all_reduce(counts)
        overall = sums.sum() / counts.sum()
        self.table = (sums + self.smoothing * overall) / (counts + self.smoothing)
        return self

    def __call__(self, category):
        return self.table[torch.from_numpy(category)]


def features(rows):
    street, agent, numbers, rent = read_table(rows)
    columns = [TargetEncoder(STREETS).fit(street, rent)(street),
               TargetEncoder(AGENTS).fit(agent, rent)(agent)]
    x = torch.cat([torch.stack(columns, 1), torch.from_numpy(numbers)], 1)
    return TensorDataset(x, torch.from_numpy(rent))


class RentNet(nn.Module):
    def __init__(self, inputs=7, width=24):
        super().__init__()
        self.wide = nn.Linear(inputs, 1)
        self.deep = nn.Sequential(nn.Linear(inputs, width), nn.ELU(), nn.Linear(width, width), nn.ELU(), nn.Linear(width, 1))

    def forward(self, x):
        return (self.wide(x) + self.deep(x)).squeeze(1)


def main():
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29622")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_default_dtype(torch.float64)

    train = features(np.arange(rank, ROWS, world))
    loader = DataLoader(train, batch_size=BATCH // world)      # the file is in shuffled order
    torch.manual_seed(5)
    net = DDP(RentNet())
    optimizer = torch.optim.Adam(net.parameters(), lr=8e-3)
    decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)

    for epoch in range(EPOCHS):
        squares = torch.zeros(1)
        for x, rent in loader:
            loss = (net(x) - rent).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            squares += loss.detach() * len(x)
        decay.step()
        dist.all_reduce(squares)
        if rank == 0:
            print(f"epoch {epoch} squared error {squares.item() / ROWS:.5f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
