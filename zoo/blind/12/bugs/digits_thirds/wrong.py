"""Is a digit below, at or above a threshold? Training and test split over processes with samplers."""
import os
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def datasets():
    d = load_digits()
    x = torch.tensor(d.data, dtype=torch.float64) / 16
    y = torch.tensor([(v > 2) + int(v > 6) for v in d.target])
    return TensorDataset(x[:1536], y[:1536]), TensorDataset(x[1536:], y[1536:])


def train_one_epoch(model, loader, optimizer):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64)
    for x, y in loader:
        out = model(x)
        sums[0] += nn.functional.cross_entropy(out, y, reduction="sum")
        sums[1] += (out.argmax(1) == y).sum()
        sums[2] += len(y)
    dist.all_reduce(sums)
    return sums[0] / sums[2], sums[1] / sums[2], int(sums[2])


def main():
    if "LOCAL_RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    train, test = datasets()
    train_sampler = DistributedSampler(train, seed=5)
    test_sampler = DistributedSampler(test, shuffle=False)
    train_loader = DataLoader(train, 96 // world, sampler=train_sampler)
    test_loader = DataLoader(test, 50, sampler=test_sampler)
    torch.manual_seed(2)
    model = DDP(nn.Sequential(nn.Linear(64, 20), nn.Tanh(), nn.Linear(20, 3)).double())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(3):
        train_sampler.set_epoch(epoch)
        train_one_epoch(model, train_loader, optimizer)
        loss, accuracy, n = evaluate(model.module, test_loader)
        if rank == 0:
            print(f"epoch {epoch}: test loss {loss:.7f} accuracy {accuracy:.7f} ({n} images)")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
