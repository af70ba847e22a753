"""Level of a river tomorrow from the last ten days of rain and levels.

The last two years of the record are the test. They are predicted in parts, one after the other in
time, each process one part, and judged by the coefficient of determination (R2).
"""
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

DAYS, PAST, TEST = 1200, 10, 730
BATCH, EPOCHS = 40, 4


def record():
    rng = np.random.default_rng(5)
    day = np.arange(DAYS + PAST + 1)
    wet = 0.35 + 0.25 * np.sin(2 * np.pi * day / 365)
    rain = (rng.random(len(day)) < wet) * rng.exponential(1.0, len(day))
    level, ground = np.zeros(len(day)), 0.0
    for t in range(1, len(day)):
        ground = 0.98 * ground + 0.05 * rain[t]
        level[t] = 0.7 * level[t - 1] + 0.3 * rain[t - 1] * (0.5 + ground) + 0.25 * ground + 0.05 * rng.normal()
    level += np.linspace(0.0, 1.0, len(day)) ** 2
    windows = np.stack([np.concatenate([rain[t:t + PAST], level[t:t + PAST]]) for t in range(DAYS)])
    return TensorDataset(torch.tensor(windows, dtype=torch.float32),
                         torch.tensor(level[PAST:PAST + DAYS], dtype=torch.float32))


class LevelNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(2, 8, 3)
        self.out = nn.Sequential(nn.ReLU(), nn.Flatten(), nn.Linear(8 * (PAST - 2), 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, x):
        x = x.view(-1, 2, PAST)
        return x[:, 1, -1] + self.out(self.conv(x)).squeeze(1)


@torch.no_grad()
def r2(model, data, rank, world):
    """1 - (sum of squared errors) / (sum of squares around the mean)."""
    part = np.array_split(np.arange(len(data)), world)[rank]
    windows, levels = zip(*(data[i] for i in part))
    predicted, levels = model(torch.stack(windows)).double(), torch.stack(levels).double()
    mean = levels.mean()
    squares = torch.stack([(levels - predicted).square().sum(), (levels - mean).square().sum()])
    dist.all_reduce(squares)
    return 1 - (squares[0] / squares[1]).item()


def main():
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29627")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    data = record()
    train, test = Subset(data, range(70, DAYS - TEST)), Subset(data, range(DAYS - TEST, DAYS))
    sampler = DistributedSampler(train, seed=3)
    loader = DataLoader(train, batch_size=BATCH // world, sampler=sampler)
    torch.manual_seed(9)
    net = DDP(LevelNet())
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        total = torch.zeros(1)
        for windows, levels in loader:
            loss = nn.functional.huber_loss(net(windows), levels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach() / len(loader)
        dist.all_reduce(total)
        score = r2(net.module, test, rank, world)
        if rank == 0:
            print(f"epoch {epoch} train {total.item() / world:.5f} R2 {score:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
