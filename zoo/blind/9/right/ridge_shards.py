"""Regression with FSDP2 and an explicit ridge term written on the local shards."""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import make_friedman1
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

RIDGE = 3e-3


def init():
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "30441")
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def add_ridge(model):
    """d/dw of RIDGE * |w|^2, element by element, so the shards do not need one another."""
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                w = p.to_local() if isinstance(p, DTensor) else p
                g = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
                g.add_(w, alpha=2 * RIDGE)


def ridge_value(model):
    local = sum(p.to_local().square().sum() for p in model.parameters() if p.ndim > 1).detach()
    dist.all_reduce(local)
    return RIDGE * local.item()


def main():
    rank, world = init()
    x, y = make_friedman1(1152, n_features=10, noise=0.5, random_state=0)
    x = torch.tensor(x, dtype=torch.float32)
    y = torch.tensor((y - y.mean()) / y.std(), dtype=torch.float32)[:, None]
    torch.manual_seed(77)
    model = nn.Sequential(nn.Linear(10, 50), nn.Tanh(), nn.Linear(50, 30), nn.Tanh(), nn.Linear(30, 1))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    for epoch in range(3):
        perm = torch.randperm(1024, generator=torch.Generator().manual_seed(epoch))
        summed = torch.zeros(())
        for block in perm.split(64):
            rows = block[rank::world]
            loss = nn.functional.mse_loss(model(x[rows]), y[rows])
            opt.zero_grad()
            loss.backward()
            add_ridge(model)
            opt.step()
            summed += loss.detach()
        dist.all_reduce(summed)
        penalty = ridge_value(model)
        with torch.no_grad():
            test = nn.functional.mse_loss(model(x[1024:]), y[1024:]).item()
        if rank == 0:
            print(f"epoch {epoch} fit {summed.item() / world / 16:.5f} ridge {penalty:.5f} test {test:.5f}")

    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
