"""Handwritten digits: a small CNN with shifts, noise and dropout, trained with DDP.

Augmentation and dropout are drawn independently on every rank (seed + rank), as usual for
data-parallel training: the draws, and only they, depend on the number of processes.
"""
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

SEED = 17
GLOBAL_BATCH = 64
EPOCHS = 3
N_TRAIN = 1408
MAX_SHIFT = 1
NOISE = 0.05
DROPOUT = 0.1


class Digits(Dataset):
    def __init__(self, train, generator=None):
        bunch = load_digits()
        order = np.random.RandomState(SEED).permutation(len(bunch.target))
        rows = order[:N_TRAIN] if train else order[N_TRAIN:]
        self.x = torch.as_tensor(bunch.images[rows] / 16.0, dtype=torch.get_default_dtype())[:, None]
        self.y = torch.as_tensor(bunch.target[rows], dtype=torch.long)
        self.generator = generator

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        x = self.x[i]
        if self.generator is not None:
            dy, dx = torch.randint(-MAX_SHIFT, MAX_SHIFT + 1, (2,), generator=self.generator).tolist()
            x = torch.roll(x, (dy, dx), dims=(1, 2))
            x = x + NOISE * torch.randn(x.shape, generator=self.generator)
        return x, self.y[i]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1 = nn.Conv2d(1, 16, 3, padding=1)
        self.g1 = nn.GroupNorm(4, 16)
        self.c2 = nn.Conv2d(16, 24, 3, padding=1)
        self.g2 = nn.GroupNorm(4, 24)
        self.drop = nn.Dropout(DROPOUT)
        self.fc = nn.Linear(24 * 4, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.g1(self.c1(x))), 2)
        x = F.max_pool2d(F.relu(self.g2(self.c2(x))), 2)
        return self.fc(self.drop(x.flatten(1)))


@torch.no_grad()
def evaluate(net, data, rank, world):
    net.eval()
    sampler = DistributedSampler(data, world, rank, shuffle=False)
    loader = DataLoader(data, batch_size=50, sampler=sampler)
    hits, seen = torch.zeros(10), torch.zeros(10)
    done = 0
    for x, y in loader:
        position = (done + torch.arange(len(y))) * world + rank
        real = position < len(data)
        done += len(y)
        right = (net(x).argmax(1) == y) & real
        hits += torch.bincount(y[right], minlength=10)
        seen += torch.bincount(y[real], minlength=10)
    if world > 1:
        dist.all_reduce(hits)
        dist.all_reduce(seen)
    net.train()
    return (hits.sum() / seen.sum()).item(), (hits / seen).mean().item(), int(seen.sum())


def main():
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(SEED)
    net = Net()
    model = DDP(net) if world > 1 else net

    torch.manual_seed(SEED + 1 + rank)
    generator = torch.Generator().manual_seed(10_000 + SEED + rank)
    train, test = Digits(True, generator), Digits(False)
    sampler = DistributedSampler(train, world, rank, shuffle=True, seed=SEED, drop_last=True)
    loader = DataLoader(train, batch_size=GLOBAL_BATCH // world, sampler=sampler, drop_last=True)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.2, total_steps=EPOCHS * len(loader))

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y, label_smoothing=0.05)
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
            total += torch.tensor([loss.item() * len(y), len(y)])
        if world > 1:
            dist.all_reduce(total)
        acc, macro, count = evaluate(net, test, rank, world)
        if rank == 0:
            print(f"epoch {epoch}: loss {total[0] / total[1]:.6f} acc {acc:.4f} macro {macro:.4f} on {count}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
