"""Monsoon rainfall regression; gradients are sums, the learning rate carries the normalisation.

Losses are summed over a worker's rows and DDP averages over workers, so the rate per row is multiplied
by the number of workers and the decay is divided accordingly.  Warm-up and decay count rows, not steps.
"""
import argparse
import math
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


class RowSchedule:
    """Rate as a function of the rows that the whole job has consumed."""

    def __init__(self, opt, peak, warm_rows, all_rows):
        self.opt, self.peak, self.warm, self.all = opt, peak, warm_rows, all_rows
        self.seen = 0

    def advance(self, local_rows):
        count = torch.tensor(local_rows)
        dist.all_reduce(count)
        self.seen += int(count)
        if self.seen < self.warm:
            f = self.seen / self.warm
        else:
            f = 0.5 * (1 + math.cos(math.pi * min(1.0, (self.seen - self.warm) / (self.all - self.warm))))
        for g in self.opt.param_groups:
            g["lr"] = self.peak * max(f, 0.02)


def seasons(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 14, generator=g)
    month = torch.randint(0, 12, (n,), generator=g)
    wet = (month >= 5) & (month <= 8)
    rain = torch.where(wet, 2.0 + x[:, 0] + 0.5 * x[:, 1] * x[:, 2], 0.2 * x[:, 3])
    return x, month, rain + 0.1 * torch.randn(n, generator=g)


class Rain(nn.Module):
    def __init__(self):
        super().__init__()
        self.month = nn.Embedding(12, 10)
        self.net = nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 20), nn.Tanh(), nn.Linear(20, 1))

    def forward(self, x, month):
        return self.net(torch.cat([x, self.month(month)], 1)).squeeze(1)


def main():
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--batch", type=int, default=48, help="rows of a step, all workers together")
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--rate", type=float, default=0.08, help="rate for the mean loss of a step")
    ap.add_argument("--decay", type=float, default=1e-3)
    cfg = ap.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    x, month, rain = seasons(576, 5)
    xv, mv, rv = seasons(150, 6)

    torch.manual_seed(51)
    model = DDP(Rain())
    rate = cfg.rate * world / cfg.batch
    opt = torch.optim.SGD(model.parameters(), lr=rate * 0.02, momentum=0.9,
                          weight_decay=cfg.decay * cfg.batch / world)
    sched = RowSchedule(opt, rate, warm_rows=5 * cfg.batch, all_rows=cfg.epochs * len(x))

    for epoch in range(cfg.epochs):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        total = torch.zeros(())
        for rows in order.split(cfg.batch):
            rows = rows[rank::world]
            loss = 0.5 * (model(x[rows], month[rows]) - rain[rows]).square().sum()
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.advance(len(rows))
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch + 1} loss {total.item() / len(x):.6f} rows {sched.seen} "
                  f"rate {opt.param_groups[0]['lr']:.6f}", flush=True)

    with torch.no_grad():
        e = (model.module(xv[rank::world], mv[rank::world]) - rv[rank::world]).abs().sum()
    dist.all_reduce(e)
    if rank == 0:
        print(f"mean absolute error {e.item() / len(rv):.6f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
