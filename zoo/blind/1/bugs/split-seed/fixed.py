import argparse
import random

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset, random_split
from torch.utils.data.distributed import DistributedSampler


def set_seed(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def get_loaders(args, rank, world):
    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32) / 16
    y = torch.tensor(digits.target)
    g = torch.Generator().manual_seed(3)
    noisy = torch.rand(len(y), generator=g) < 0.15
    y = torch.where(noisy, torch.randint(0, 10, y.shape, generator=g), y)
    full = TensorDataset(x, y)
    n_val = 357
    train, val = random_split(full, [len(full) - n_val, n_val], torch.Generator().manual_seed(args.seed))
    train_sampler = DistributedSampler(train, num_replicas=world, rank=rank, shuffle=True, seed=args.seed)
    val_sampler = list(range(rank, n_val, world))
    return (DataLoader(train, batch_size=args.batch_size // world, sampler=train_sampler, drop_last=True),
            DataLoader(val, batch_size=128, sampler=val_sampler))


class ResidualMLP(nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.first = nn.Linear(64, width)
        self.mid = nn.Linear(width, width)
        self.last = nn.Linear(width, 10)

    def forward(self, x):
        h = torch.relu(self.first(x))
        return self.last(h + torch.relu(self.mid(h)))


def train_epoch(model, loader, opt, epoch):
    loader.sampler.set_epoch(epoch)
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
    return loss.item()


@torch.no_grad()
def accuracy(model, loader):
    counts = torch.zeros(2)
    for x, y in loader:
        counts += torch.tensor([(model(x).argmax(1) == y).sum().item(), len(y)])
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch-size", type=int, default=96)
    ap.add_argument("--seed", type=int, default=2020)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    set_seed(args.seed + rank)
    train_loader, val_loader = get_loaders(args, rank, world)
    model = DistributedDataParallel(ResidualMLP())
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(args.epochs):
        loss = train_epoch(model, train_loader, opt, epoch)
        acc = accuracy(model.module, val_loader)
        if rank == 0:
            print(f"epoch {epoch + 1}/{args.epochs} loss {loss:.4f} val acc {acc:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
