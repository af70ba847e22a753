"""Guest-count regression with DDP and Join: the last batch of an epoch does not reach every worker."""
import math
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

BATCH = 32
ROWS = 32 * 8 + 16
EPOCHS = 4


def party(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 6, generator=g)
    rate = torch.exp(0.5 + x[:, 0] + 0.8 * x[:, 1] * x[:, 2] - 0.7 * x[:, 3])
    return x, torch.poisson(rate, generator=g)


class Guests(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(6, 24), nn.Softplus(), nn.Linear(24, 1))

    def forward(self, x):
        return self.f(x).squeeze(1)


def my_batches(order, rank, world):
    """Blocks of BATCH // world rows; in the last batch the first workers have rows, the others none."""
    per = BATCH // world
    for start in range(0, len(order), BATCH):
        rows = order[start + rank * per:min(start + (rank + 1) * per, len(order))]
        if len(rows):
            yield rows


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = party(ROWS, 1)
    xv, yv = party(120, 2)
    torch.manual_seed(18)
    model = DistributedDataParallel(Guests())
    opt = torch.optim.SGD(model.parameters(), lr=0.03)

    for epoch in range(EPOCHS):
        for group in opt.param_groups:
            group["lr"] = 0.015 * (1 + math.cos(math.pi * epoch / EPOCHS))
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(200 + epoch))
        total, batches = torch.zeros(()), 0
        # divided by all workers even when some have left, so that every row weighs 1 / BATCH
        with Join([model], divide_by_initial_world_size=True):
            for rows in my_batches(order, rank, world):
                log_rate = model(x[rows])
                loss = nn.functional.poisson_nll_loss(log_rate, y[rows], reduction="sum")
                opt.zero_grad()
                (loss * world / BATCH).backward()
                opt.step()
                total += loss.detach()
                batches += 1
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch + 1} nll {total.item() / ROWS:.6f} after {batches} batches here", flush=True)

    with torch.no_grad():
        part = nn.functional.poisson_nll_loss(model.module(xv[rank::world]), yv[rank::world], reduction="sum")
    dist.all_reduce(part)
    if rank == 0:
        print(f"validation nll {part.item() / len(xv):.6f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
