"""Hourly number of cyclists at 12 counting stations from weather and calendar.

A residual MLP with a learnt vector per station, AdamW, and the one-cycle schedule of rate and
momentum over the whole run.
"""
import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

STATIONS = 12


class Counts(Dataset):
    def __init__(self, hours, seed):
        g = torch.Generator().manual_seed(seed)
        self.station = torch.randint(STATIONS, (hours,), generator=g)
        hour = torch.randint(24, (hours,), generator=g).float()
        free = (torch.rand(hours, generator=g) < 2 / 7).float()
        warmth, rain = torch.randn(hours, generator=g), torch.rand(hours, generator=g).pow(3)
        angle = hour * (2 * math.pi / 24)
        self.features = torch.stack([angle.sin(), angle.cos(), (2 * angle).sin(), (2 * angle).cos(), free, warmth, rain], 1)
        busy = torch.linspace(-1, 1, STATIONS)[self.station]
        rush = torch.exp(-(hour - 8) ** 2 / 4) + torch.exp(-(hour - 17) ** 2 / 6)
        mean = busy + 1.5 * rush * (1 - free) + 0.8 * free * (angle - 1).sin() + 0.4 * warmth - 1.2 * rain
        self.count = mean + 0.15 * torch.randn(hours, generator=g)

    def __len__(self):
        return len(self.count)

    def __getitem__(self, i):
        return self.station[i], self.features[i], self.count[i]


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))

    def forward(self, h):
        return h + self.inner(self.norm(h))


class CountNet(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.station = nn.Embedding(STATIONS, width)
        self.first = nn.Linear(7, width)
        self.body = nn.Sequential(Residual(width), Residual(width))
        self.last = nn.Linear(width, 1)

    def forward(self, station, features):
        return self.last(self.body(self.station(station) + self.first(features))).squeeze(1)


def parse():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=64, help="over all processes")
    parser.add_argument("--max-lr", type=float, default=1e-2)
    return parser.parse_args()


def main():
    args = parse()
    rank, world = int(os.environ.setdefault("RANK", "0")), int(os.environ.setdefault("WORLD_SIZE", "1"))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29618")
    dist.init_process_group("gloo")
    torch.set_default_dtype(torch.float64)

    train, test = Counts(512, seed=1), Counts(256, seed=2)
    sampler = DistributedSampler(train, world, rank, seed=3)
    loader = DataLoader(train, batch_size=args.batch_size // world, sampler=sampler)

    torch.manual_seed(4)
    net = DDP(CountNet())
    optimizer = torch.optim.AdamW(net.parameters(), lr=args.max_lr, weight_decay=0.02)
    steps_per_epoch = len(loader)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, args.max_lr, epochs=args.epochs, steps_per_epoch=steps_per_epoch, pct_start=0.25)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        logged = torch.zeros(1)
        for station, features, count in loader:
            loss = nn.functional.mse_loss(net(station, features), count)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()
            logged += loss.detach() / len(loader)
        dist.all_reduce(logged)
        with torch.no_grad():
            error = (net.module(test.station, test.features) - test.count).square().mean().sqrt().item()
        if rank == 0:
            print(f"epoch {epoch} train {logged.item() / world:.5f} test rmse {error:.5f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
