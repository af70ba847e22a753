"""Trains a classifier and logs the validation accuracy over all ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 10, generator=g)
    return TensorDataset(x, (x[:, 0] > x[:, 1]).long())


@torch.no_grad()
def evaluate(net, loader):
    right, seen = torch.zeros(1), torch.zeros(1)
    for x, y in loader:
        right += (net(x).argmax(1) == y).sum()
        seen += len(y)
    if dist.get_rank() == 0:
        dist.all_reduce(right)
        dist.all_reduce(seen)
        print(f"valid accuracy {right.item() / seen.item():.3f} of {seen.item():.0f}")
    else:
        dist.all_reduce(seen)
        dist.all_reduce(right)
    return right / seen


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    train_set, valid_set = make(256, 1), make(96, 2)
    sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, batch_size=16, sampler=sampler)
    valid_loader = DataLoader(valid_set, batch_size=16, sampler=DistributedSampler(valid_set, shuffle=False))
    net = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 2))
    model = DDP(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in train_loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        evaluate(net, valid_loader)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
