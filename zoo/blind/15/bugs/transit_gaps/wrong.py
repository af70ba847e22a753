"""Will this tap of a travel card be followed by a change of line? Online training on a log.

The log is read as a stream. Features of a tap: the station, the time of day, the time since the
card's last tap and how often the card was seen before.
"""
import math
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset

STATIONS, CARDS, TAPS, BATCH = 20, 60, 2560, 64


def read_log():
    """Yields (time in hours, card, station, changed) in the order of time."""
    rng = np.random.default_rng(17)
    hub = rng.random(STATIONS)
    last, seen, time = np.full(CARDS, -9.0), np.zeros(CARDS), 0.0
    weight = rng.pareto(1.5, CARDS) + 0.2
    for _ in range(TAPS):
        time += rng.exponential(0.02)
        card = int(rng.choice(CARDS, p=weight / weight.sum()))
        station = int(rng.integers(STATIONS))
        gap = min(time - last[card], 8.0)
        score = 2.5 * hub[station] - 1.5 + 1.5 * (gap < 0.5) - 0.3 * gap + 0.3 * math.log1p(seen[card])
        yield time, card, station, float(rng.random() < 1 / (1 + math.exp(-score)))
        last[card], seen[card] = time, seen[card] + 1


class TapStream(IterableDataset):
    def __init__(self, rank, world):
        self.rank, self.world = rank, world

    def __iter__(self):
        last, count = {}, {}
        for line, (time, card, station, changed) in enumerate(read_log()):
            if line % self.world != self.rank:
                continue
            gap = min(time - last.get(card, -9.0), 8.0)
            before = count.get(card, 0)
            last[card], count[card] = time, before + 1
            day = 2 * math.pi * (time % 24) / 24
            row = [gap, math.log1p(gap), float(gap < 0.5), math.log1p(before), math.sin(day), math.cos(day)]
            yield station, torch.tensor(row), torch.tensor(changed)


class ChangeNet(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.station = nn.Embedding(STATIONS, width)
        self.numbers = nn.Linear(6, width)
        self.top = nn.Sequential(nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, station, row):
        return self.top(self.station(station) + self.numbers(row)).squeeze(1)


def main():
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29625")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    loader = DataLoader(TapStream(rank, world), batch_size=BATCH // world, drop_last=True)
    torch.manual_seed(4)
    net = DDP(ChangeNet())
    optimizer = torch.optim.Adagrad(net.parameters(), lr=0.05)

    logged = torch.zeros(1)
    for step, (station, row, changed) in enumerate(loader, 1):
        loss = nn.functional.binary_cross_entropy_with_logits(net(station, row), changed)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        logged += loss.detach()
        if step % 10 == 0:
            dist.all_reduce(logged)
            if rank == 0:
                print(f"step {step} loss of the last ten {logged.item() / 10 / world:.4f}", flush=True)
            logged.zero_()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
