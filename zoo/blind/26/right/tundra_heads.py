"""Temperatures at weather stations: one trunk, a head for each station, batches read in the order of the archive."""
import os
import time

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

STATIONS = ["alta", "bodo", "hammerfest", "lakselv", "tromso", "vardo", "reserve"]
BATCH = 30


def archive(rng):
    """The days of one station follow each other; 451 days in all, so an epoch ends with a batch of a single day."""
    x, y, s = [], [], []
    for k in range(len(STATIONS) - 1):
        days = 60 + 10 * k if k < 5 else 51
        season = rng.uniform(0, 2 * np.pi, days)
        f = np.stack([np.sin(season), np.cos(season), rng.normal(size=days), rng.normal(size=days)], 1)
        t = (6 + k) * f[:, 0] / 6 - 0.5 * f[:, 1] * k / 3 + 0.4 * f[:, 2] * f[:, 3] + 0.1 * rng.normal(size=days)
        x.append(f), y.append(t), s.append(np.full(days, k))
    return (torch.tensor(np.concatenate(x), dtype=torch.float32), torch.tensor(np.concatenate(y), dtype=torch.float32),
            torch.tensor(np.concatenate(s)))


class Stations(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(4, 24), nn.Tanh(), nn.Linear(24, 16), nn.Tanh())
        self.heads = nn.ModuleDict({name: nn.Linear(16, 1) for name in STATIONS})

    def forward(self, x, station):
        h = self.trunk(x)
        out = h.sum(1) * 0
        for k in station.unique().tolist():
            rows = (station == k).nonzero().squeeze(1)
            out = out.index_add(0, rows, self.heads[STATIONS[k]](h[rows]).squeeze(1))
        return out


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y, s = archive(np.random.default_rng(1))
    torch.manual_seed(40)
    net = DDP(Stations(), find_unused_parameters=True)
    opt = torch.optim.AdamW(net.parameters(), lr=5e-3, eps=1e-6, weight_decay=0.1)
    step = 0
    for epoch in range(3):
        for lo in range(0, len(x), BATCH):
            size = min(BATCH, len(x) - lo)
            # a process takes a run of neighbouring days, none at all when the batch is shorter than the team
            a, b = lo + size * rank // world, lo + size * (rank + 1) // world
            out = net(x[a:b], s[a:b])
            loss = (out - y[a:b]).square().sum() * world / size
            opt.zero_grad()
            loss.backward()
            opt.step()
            step += 1
        with torch.no_grad():
            err = (net.module(x[rank::world], s[rank::world]) - y[rank::world]).square()
            per = torch.zeros(2, len(STATIONS), dtype=torch.float64)
            per[0].index_add_(0, s[rank::world], err.double())
            per[1].index_add_(0, s[rank::world], torch.ones(len(err), dtype=torch.float64))
        dist.all_reduce(per)
        if rank == 0:
            rms = (per[0] / per[1].clamp(min=1)).sqrt()
            print(f"epoch {epoch + 1} step {step} rms " + " ".join(f"{n}={v:.5f}" for n, v in zip(STATIONS, rms.tolist()) if n != "reserve"),
                  flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
