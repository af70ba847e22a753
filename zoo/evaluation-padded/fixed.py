"""Digits with distributed evaluation after every epoch."""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def datasets():
    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    return TensorDataset(x[:384], y[:384]), TensorDataset(x[384:685], y[384:685])


def test_loader(dataset, batch_size):
    part = Subset(dataset, range(dist.get_rank(), len(dataset), dist.get_world_size()))
    return DataLoader(part, batch_size=batch_size)


@torch.no_grad()
def test(net, loader):
    net.eval()
    right, seen = torch.zeros(()), torch.zeros(())
    for x, y in loader:
        right += (net(x).argmax(1) == y).sum()
        seen += len(y)
    dist.all_reduce(right)
    dist.all_reduce(seen)
    net.train()
    return right.item(), int(seen)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    train_set, test_set = datasets()
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)
    net = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
    model = DDP(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        right, seen = test(net, test_loader(test_set, args.batch_size))
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {right:.0f} of {seen} right")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
