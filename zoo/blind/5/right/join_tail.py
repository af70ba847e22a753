"""Synthetic table, batches dealt in blocks; DDP's join lets a process with fewer blocks wait for the others."""
import argparse
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import make_classification
from torch.nn.parallel import DistributedDataParallel


class Blocks:
    """Blocks of 16 rows. A step takes `per_step` blocks, dealt to the processes; the last one may not reach all."""

    def __init__(self, x, y, per_step, rank, world):
        self.x, self.y, self.per_step, self.rank, self.world = x, y, per_step, rank, world

    def epoch(self, seed):
        order = torch.randperm(len(self.x), generator=torch.Generator().manual_seed(seed))
        blocks = list(order.split(16))
        for k in range(0, len(blocks), self.per_step):
            share = blocks[k:k + self.per_step]
            each = max(1, len(share) // self.world)
            mine = share[self.rank * each:(self.rank + 1) * each]
            if mine:
                rows = torch.cat(mine)
                yield self.x[rows], self.y[rows]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--lr", type=float, default=0.3)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = make_classification(1424, 24, n_informative=12, n_classes=3, random_state=3)
    x, y = torch.tensor(x, dtype=torch.float32), torch.tensor(y)
    train = Blocks(x[:1104], y[:1104], 4, rank, world)
    torch.manual_seed(1)
    net = DistributedDataParallel(nn.Sequential(nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 24), nn.Tanh(),
                                                nn.Linear(24, 3)))
    opt = torch.optim.SGD(net.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        opt.param_groups[0]["lr"] = args.lr / (1 + epoch)
        steps = 0
        with net.join(divide_by_initial_world_size=False):
            for xb, yb in train.epoch(epoch):
                opt.zero_grad()
                nn.functional.cross_entropy(net(xb), yb).backward()
                opt.step()
                steps += 1
        with torch.no_grad():
            hits = (net.module(x[1104:]).argmax(1) == y[1104:]).float().mean().item()
        if rank == 0:
            print(f"epoch {epoch}: {steps} steps, accuracy {hits:.4f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
