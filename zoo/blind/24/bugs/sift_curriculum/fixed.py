"""Sieve training: after a first pass, every epoch trains only on the rows with the largest loss so far."""
import os
import time

import numpy as np
import torch
import torch.distributed as dist
from sklearn.datasets import make_moons
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

BATCH, EPOCHS, KEEP = 32, 5, 0.5


class Sieve(Sampler):
    def __init__(self, n, rank, world):
        self.table = torch.full((n,), 10.0)
        self.rank, self.world, self.epoch = rank, world, 0

    def record(self, rows, losses):
        fresh = torch.zeros(2, len(self.table))
        fresh[0, rows], fresh[1, rows] = losses, 1.0
        if self.world > 1:
            dist.all_reduce(fresh)
        self.table = torch.where(fresh[1] > 0, fresh[0], self.table)

    def order(self):
        n = len(self.table)
        if self.epoch == 0:
            return np.random.RandomState(0).permutation(n)
        hardest = self.table.argsort(descending=True)[: int(KEEP * n)].numpy()
        return np.random.RandomState(self.epoch).permutation(np.sort(hardest))

    def __iter__(self):
        return iter(self.order()[self.rank::self.world].tolist())

    def __len__(self):
        return len(self.order()) // self.world


def main(rank, world):
    x, y = make_moons(384, noise=0.25, random_state=3)
    x, y = torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32)
    data = TensorDataset(torch.arange(len(x)), x, y)
    sieve = Sieve(len(x), rank, world)
    loader = DataLoader(data, batch_size=BATCH // world, sampler=sieve)
    torch.manual_seed(2)
    net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    opt = torch.optim.SGD(net.parameters(), lr=0.3)
    for epoch in range(EPOCHS):
        sieve.epoch = epoch
        for rows, xb, yb in loader:
            each = nn.functional.binary_cross_entropy_with_logits(net(xb).squeeze(1), yb, reduction="none")
            sieve.record(rows, each.detach())
            opt.zero_grad()
            each.mean().backward()
            if world > 1:
                for p in net.parameters():
                    dist.all_reduce(p.grad)
                    p.grad /= world
            opt.step()
        if rank == 0:
            with torch.no_grad():
                acc = ((net(x).squeeze(1) > 0) == (y > 0.5)).float().mean().item()
                all_loss = nn.functional.binary_cross_entropy_with_logits(net(x).squeeze(1), y).item()
            print(f"epoch {epoch} loss {all_loss:.5f} accuracy {acc:.4f}", flush=True)


if __name__ == "__main__":
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    main(int(os.environ.get("RANK", "0")), world)
    time.sleep(0.3)
    if world > 1:
        dist.destroy_process_group()
