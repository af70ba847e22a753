"""Every row is used in every epoch, also those of the short last batch, which not all processes may get a part of."""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import make_friedman2
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP

BATCH, EPOCHS = 64, 8


class Parts:
    def __init__(self, x, y, rank, world):
        self.x, self.y = x, y
        self.share, self.rank = BATCH // world, rank

    def epoch(self, number):
        order = torch.randperm(len(self.x), generator=torch.Generator().manual_seed(number))
        for start in range(0, len(order), BATCH):
            rows = order[start:start + BATCH]
            mine = rows[self.rank * self.share:(self.rank + 1) * self.share]
            if len(mine):
                yield self.x[mine], self.y[mine], len(rows)


def main():
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29844")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    x, y = make_friedman2(n_samples=840, noise=10.0, random_state=2)
    x = torch.tensor((x - x.mean(0)) / x.std(0), dtype=torch.float32)
    y = torch.tensor((y - y.mean()) / y.std(), dtype=torch.float32)
    parts = Parts(x[:680], y[:680], rank, world)       # ten full batches and one of 40

    torch.manual_seed(18)
    model = DDP(nn.Sequential(nn.Linear(4, 48), nn.Tanh(), nn.Linear(48, 24), nn.Tanh(), nn.Linear(24, 1)))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(EPOCHS):
        total = torch.zeros(())
        with Join([model]):
            for xb, yb, size in parts.epoch(epoch):
                error = (model(xb).squeeze(1) - yb).square().sum()
                loss = error * world / size
                opt.zero_grad()
                loss.backward()
                opt.step()
                total += error.detach()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch} mse {total.item() / 680:.6f}")

    with torch.no_grad():
        test = (model.module(x[680:]).squeeze(1) - y[680:]).square().mean()
    if rank == 0:
        print(f"test mse {test.item():.6f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
