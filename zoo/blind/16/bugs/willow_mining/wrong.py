"""Telling healthy from sick willows with hard example mining: every epoch repeats the hardest half of the last one."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import make_classification
from torch.nn.parallel import DistributedDataParallel

torch.set_default_dtype(torch.float64)
TREES, BATCH, EPOCHS = 768, 32, 5


def begin():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.get_rank(), dist.get_world_size()


def summed(x):
    x = x.clone()
    dist.all_reduce(x)
    return x


class HardExamples:
    """Batches of indices: the hardest half of the trees and a random quarter."""

    def __init__(self, n, batch, rank, world, seed=0):
        self.n, self.batch, self.rank, self.world, self.seed = n, batch, rank, world, seed
        self.losses = torch.full((n,), 100.0)
        self.start_epoch(0)

    def start_epoch(self, epoch):
        self.generator = torch.Generator().manual_seed(self.seed + epoch)
        self.found = torch.zeros(2, self.n)
        self.all = epoch == 0

    def __iter__(self):
        order = torch.randperm(self.n, generator=self.generator)
        if not self.all:
            hard = torch.zeros(self.n, dtype=torch.bool)
            hard[self.losses.topk(self.n // 2).indices] = True
            easy = order[~hard[order]][:self.n // 4]
            hard[easy] = True
            order = order[hard[order]]
        for batch in order.split(self.batch):
            yield batch[self.rank::self.world]

    def record(self, index, losses):
        self.found[0, index] = losses.detach()
        self.found[1, index] = 1

    def end_epoch(self):
        found = self.found
        self.losses = torch.where(found[1] > 0, found[0], self.losses)


class WillowNet(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.one = nn.Linear(features, 48)
        self.two = nn.Linear(48, 48)
        self.out = nn.Linear(48, 2)

    def forward(self, x):
        x = F.relu(self.one(x))
        return self.out(x + F.relu(self.two(x)))


def main():
    rank, world = begin()
    x, y = make_classification(TREES + 256, 12, n_informative=8, n_clusters_per_class=3, flip_y=0.02, random_state=4)
    x, y = torch.as_tensor(x), torch.as_tensor(y)
    torch.manual_seed(9)
    model = DistributedDataParallel(WillowNet(12))
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    sampler = HardExamples(TREES, BATCH, rank, world, seed=60)
    for epoch in range(EPOCHS):
        sampler.start_epoch(epoch)
        total = torch.zeros(2)
        for index in sampler:
            losses = F.cross_entropy(model(x[index]), y[index], reduction="none")
            sampler.record(index, losses)
            opt.zero_grad()
            losses.mean().backward()
            opt.step()
            total += torch.tensor([losses.sum().item(), len(index)])
        sampler.end_epoch()
        total = summed(total)
        if rank == 0:
            print(f"epoch {epoch} trees {int(total[1])} loss {total[0] / total[1]:.8f}")
    if rank == 0:
        with torch.no_grad():
            logits = model.module(x[TREES:])
        print(f"new trees loss {F.cross_entropy(logits, y[TREES:]):.8f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
