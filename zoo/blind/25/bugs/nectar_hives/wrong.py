"""Forecast the next reading of beehive sensors (weight, temperature, humidity) with a GRU.

Sensors drop out for long stretches, so every target has a mask of readings that are really there.

    torchrun --nproc-per-node=2 nectar_hives.py
"""
import argparse
import math
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--hives", type=int, default=192)
    p.add_argument("--hours", type=int, default=24)
    p.add_argument("--batch-size", type=int, default=32, help="over all processes")
    p.add_argument("--epochs", type=int, default=6)
    p.add_argument("--lr", type=float, default=0.15)
    return p.parse_args()


def make_hives(n, hours, seed=11):
    g = torch.Generator().manual_seed(seed)
    t = torch.arange(hours + 1, dtype=torch.float32)
    phase = torch.rand(n, 1, 3, generator=g) * 2 * math.pi
    level = torch.randn(n, 1, 3, generator=g)
    speed = torch.tensor([2 * math.pi / 24, 2 * math.pi / 12, 2 * math.pi / 8])
    series = level + torch.sin(t[None, :, None] * speed + phase)
    series = series + 0.1 * torch.randn(n, hours + 1, 3, generator=g)
    loss_rate = torch.rand(n, 1, 1, generator=g) * 0.9
    present = (torch.rand(n, hours + 1, 3, generator=g) > loss_rate).float()
    return series, present


class HiveNet(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.rnn = nn.GRU(6, width, batch_first=True)
        self.out = nn.Linear(width, 3)

    def forward(self, values, present):
        h, _ = self.rnn(torch.cat([values * present, present], dim=-1))
        return self.out(h)


def masked_mse(pred, target, mask, world):
    total = ((pred - target) ** 2 * mask).sum()
    count = mask.sum()
    return total / count.clamp(min=1.0)


def main():
    args = parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    series, present = make_hives(args.hives, args.hours)
    model = DDP(HiveNet())
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.8)
    local = args.batch_size // world

    for epoch in range(args.epochs):
        order = torch.randperm(args.hives, generator=torch.Generator().manual_seed(100 + epoch))
        running = torch.zeros(())
        steps = args.hives // args.batch_size
        for step in range(steps):
            batch = order[step * args.batch_size:(step + 1) * args.batch_size]
            mine = batch[rank * local:(rank + 1) * local]
            x, m = series[mine], present[mine]
            pred = model(x[:, :-1], m[:, :-1])
            loss = masked_mse(pred, x[:, 1:], m[:, 1:], world)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            running += loss.detach()
        dist.all_reduce(running)
        if rank == 0:
            print(f"epoch {epoch} loss {running.item() / world / steps:.4f}", flush=True)

    with torch.no_grad():
        pred = model.module(series[:, :-1], present[:, :-1])
        err = ((pred - series[:, 1:]) ** 2 * present[:, 1:]).sum() / present[:, 1:].sum()
    if rank == 0:
        print(f"final masked mse {err.item():.6f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
