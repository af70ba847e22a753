"""Uneven shares: the last batch of an epoch does not reach every process."""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_diabetes
from torch.nn.parallel import DistributedDataParallel as DDP

ROWS = 401
GLOBAL = 16


def share(epoch, rank, world):
    """This process's batches; the last of the epoch has a single row, which process 0 gets."""
    perm = torch.randperm(ROWS, generator=torch.Generator().manual_seed(epoch))
    for block in perm.split(GLOBAL):
        mine = block[rank::world]
        if len(mine):
            yield mine, len(block)


def main():
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29888")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    d = load_diabetes()
    x = torch.tensor(d.data * 20, dtype=torch.float32)
    y = torch.tensor((d.target - 150) / 80, dtype=torch.float32)

    torch.manual_seed(19)
    model = DDP(nn.Sequential(nn.Linear(10, 24), nn.Tanh(), nn.Linear(24, 1)))
    opt = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5)

    for epoch in range(5):
        steps = 0
        with model.join(divide_by_initial_world_size=True):
            for rows, size in share(epoch, rank, world):
                error = (model(x[rows]).squeeze(1) - y[rows]).square().sum()
                opt.zero_grad()
                (error * world / size).backward()
                opt.step()
                steps += 1
        # whoever ran out before does not have the last update yet
        for p in model.parameters():
            dist.broadcast(p.data, src=0)
        for p in model.parameters():
            dist.broadcast(opt.state[p]["momentum_buffer"], src=0)
        with torch.no_grad():
            test = (model.module(x[ROWS:]).squeeze(1) - y[ROWS:]).square().mean().item()
        if rank == 0:
            print(f"epoch {epoch} steps {steps} test error {test:.6f}")

    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
