"""Sharpness-aware minimisation (SAM) on the wine data.

No rows are padded or dropped: the last batch of an epoch is short and the shares of a batch are unequal, so every
process weighs its loss by its number of rows.
"""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_wine
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Sampler, TensorDataset

BATCH, EPOCHS = 30, 9


class SAM:
    """Two gradients a step: at the weights and at the worst point nearby."""

    def __init__(self, params, base, rho=0.08, **kw):
        self.params = list(params)
        self.base, self.rho = base(self.params, **kw), rho

    @torch.no_grad()
    def climb(self):
        norm = torch.stack([p.grad.norm() for p in self.params]).norm()
        self.saved = [p.clone() for p in self.params]
        for p in self.params:
            p.add_(p.grad, alpha=self.rho / (norm.item() + 1e-12))
        self.base.zero_grad()

    @torch.no_grad()
    def descend(self):
        for p, old in zip(self.params, self.saved):
            p.copy_(old)
        self.base.step()
        self.base.zero_grad()


class BatchShares(Sampler):
    """The rank-th share of every batch of a shuffled epoch; shares differ by at most one row."""

    def __init__(self, n, batch, rank, world, seed):
        self.n, self.batch, self.rank, self.world, self.seed, self.epoch = n, batch, rank, world, seed, 0

    def __len__(self):
        return -(-self.n // self.batch)

    def __iter__(self):
        order = torch.randperm(self.n, generator=torch.Generator().manual_seed(self.seed + self.epoch))
        self.epoch += 1
        for rows in order.split(self.batch):
            yield rows.tensor_split(self.world)[self.rank].tolist()


def main():
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29617")
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    torch.manual_seed(rank)

    x, y = load_wine(return_X_y=True)
    x = torch.tensor((x - x.mean(0)) / x.std(0), dtype=torch.float32)
    y = torch.tensor(y)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(7))
    train_x, train_y, test_x, test_y = x[order[:142]], y[order[:142]], x[order[142:]], y[order[142:]]
    shares = BatchShares(len(train_x), BATCH, rank, world, seed=50)
    loader = DataLoader(TensorDataset(train_x, train_y), batch_sampler=shares)

    model = DDP(nn.Sequential(nn.Linear(13, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 3)))
    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=5e-3)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer.base, [4, 7], gamma=0.3)
    for epoch in range(EPOCHS):
        stats = torch.zeros(3, dtype=torch.float64)
        for i, (rows, target) in enumerate(loader):
            size = min(BATCH, len(train_x) - i * BATCH)              # rows of the whole batch
            weight = len(rows) * world / size
            loss = F.cross_entropy(model(rows), target) * weight
            loss.backward()
            optimizer.climb()
            worst = F.cross_entropy(model(rows), target) * weight
            worst.backward()
            optimizer.descend()
            stats += torch.tensor([loss.item() * size / world, worst.item() * size / world, len(rows)])
        schedule.step()
        dist.all_reduce(stats)
        part = slice(rank * len(test_x) // world, (rank + 1) * len(test_x) // world)
        with torch.no_grad():
            out = model.module(test_x[part])
            test = torch.stack([F.cross_entropy(out, test_y[part], reduction="sum"), (out.argmax(1) == test_y[part]).sum()])
        dist.all_reduce(test)
        if rank == 0:
            print(f"epoch {epoch} rows {int(stats[2])} loss {stats[0] / stats[2]:.4f} nearby {stats[1] / stats[2]:.4f} "
                  f"test {test[0] / len(test_x):.4f} right {int(test[1])} of {len(test_x)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
