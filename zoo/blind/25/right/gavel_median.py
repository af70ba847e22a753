"""Robust training on corrupted house prices: coordinate-wise median over eight fixed juries.

A step's rows are split into eight juries whatever the number of workers.  Every worker computes the
gradients of its juries; all are gathered and the median of every coordinate is used.
"""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.utils import parameters_to_vector

JURIES, PER_JURY, STEPS = 8, 10, 40


def prices():
    g = torch.Generator().manual_seed(66)
    x = torch.randn(900, 8, generator=g)
    y = x[:, 0] * 2 + x[:, 1] * x[:, 2] + x[:, 3].abs()
    wrong = torch.rand(900, generator=g) < 0.04
    y[:800] = torch.where(wrong[:800], 40 * torch.randn(800, generator=g), y[:800])
    return x, y


class MedianOfJuries:
    def __init__(self, model, rank, world):
        assert JURIES % world == 0
        self.model, self.world = model, world
        self.mine = range(rank * JURIES // world, (rank + 1) * JURIES // world)

    def collect(self, x, y):
        rows, losses = [], []
        for j in self.mine:
            sl = slice(j * PER_JURY, (j + 1) * PER_JURY)
            loss = nn.functional.mse_loss(self.model(x[sl]).squeeze(1), y[sl])
            grads = torch.autograd.grad(loss, list(self.model.parameters()))
            rows.append(parameters_to_vector(grads))
            losses.append(loss.detach())
        local = torch.stack(rows)
        table = [torch.empty_like(local) for _ in range(self.world)]
        dist.all_gather(table, local)
        return torch.cat(table), torch.stack(losses)

    def assign(self, vec):
        at = 0
        for p in self.model.parameters():
            p.grad = vec[at:at + p.numel()].view_as(p).clone()
            at += p.numel()


def middle(table):
    s = table.sort(dim=0).values
    return 0.5 * (s[JURIES // 2 - 1] + s[JURIES // 2])


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = prices()
    torch.manual_seed(67)
    model = nn.Sequential(nn.Linear(8, 32), nn.ELU(), nn.Linear(32, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.8)
    court = MedianOfJuries(model, rank, world)
    gen = torch.Generator().manual_seed(68)

    for step in range(STEPS):
        ids = torch.randperm(800, generator=gen)[:JURIES * PER_JURY]
        table, losses = court.collect(x[ids], y[ids])
        court.assign(middle(table))
        opt.step()
        if rank == 0 and step % 8 == 7:
            spread = table.norm(dim=1)
            print(f"step {step + 1} jury norms {spread.min().item():.4f}..{spread.max().item():.4f}, "
                  f"worst of mine {losses.max().item():.3f}", flush=True)

    with torch.no_grad():
        e = (model(x[800:]).squeeze(1) - y[800:])[rank::world].square().sum()
    dist.all_reduce(e)
    if rank == 0:
        print(f"mse on clean prices {e.item() / 100:.6f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
