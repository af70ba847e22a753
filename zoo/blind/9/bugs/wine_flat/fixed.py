"""Sharpness-aware minimisation (two passes per step) on the wine data."""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_wine
from sklearn.preprocessing import StandardScaler
from torch.nn.parallel import DistributedDataParallel as DDP

RHO = 0.3
BATCH = 32
STEPS = 100


def env():
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "30071")


@torch.no_grad()
def climb(params):
    """Move to the worst point within the ball; returns what was added."""
    norm = torch.sqrt(sum(p.grad.square().sum() for p in params)) + 1e-12
    moves = [p.grad * (RHO / norm) for p in params]
    for p, e in zip(params, moves):
        p.add_(e)
    return moves


@torch.no_grad()
def descend(params, moves):
    for p, e in zip(params, moves):
        p.sub_(e)


def main():
    env()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    wine = load_wine()
    x = torch.tensor(StandardScaler().fit_transform(wine.data), dtype=torch.float32)
    y = torch.tensor(wine.target)
    torch.manual_seed(3)
    model = DDP(nn.Sequential(nn.Linear(13, 32), nn.Tanh(), nn.Linear(32, 3)))
    params = list(model.parameters())
    opt = torch.optim.SGD(params, lr=0.05, momentum=0.9)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, STEPS)
    gen = torch.Generator().manual_seed(8)

    for step in range(STEPS):
        rows = torch.randperm(len(x), generator=gen)[:BATCH][rank::world]
        xb, yb = x[rows], y[rows]
        opt.zero_grad()
        F.cross_entropy(model(xb), yb).backward()
        moves = climb(params)
        opt.zero_grad()
        loss = F.cross_entropy(model(xb), yb)
        loss.backward()
        descend(params, moves)
        opt.step()
        sched.step()
        if step % 25 == 24:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step + 1} perturbed loss {mean.item() / world:.6f}")

    with torch.no_grad():
        full = F.cross_entropy(model(x), y)
    if rank == 0:
        print(f"loss on all rows {full.item():.6f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
