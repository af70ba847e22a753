"""A small network with batch normalisation on tabular data."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH_SIZE = 16


def tabular(n, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 10, generator=generator) * torch.arange(1, 11) + 3
    return TensorDataset(x, ((x - 3) / torch.arange(1, 11))[:, :4].argmax(1))


def validate(model, loader):
    model.eval()
    totals = torch.zeros(2)
    with torch.no_grad():
        for x, y in loader:
            totals[0] += nn.functional.cross_entropy(model(x), y, reduction="sum")
            totals[1] += len(y)
    dist.all_reduce(totals)
    model.train()
    return (totals[0] / totals[1]).item()


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(8)
    net = nn.Sequential(nn.BatchNorm1d(10), nn.Linear(10, 32), nn.ReLU(), nn.BatchNorm1d(32), nn.Linear(32, 4))
    model = DistributedDataParallel(net, broadcast_buffers=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    train_set, valid_set = tabular(256, seed=1), tabular(128, seed=2)
    sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, batch_size=BATCH_SIZE, sampler=sampler)
    valid_sampler = DistributedSampler(valid_set, shuffle=False)
    valid_loader = DataLoader(valid_set, batch_size=BATCH_SIZE, sampler=valid_sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in train_loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        valid_loss = validate(model, valid_loader)
        if rank == 0:
            print(f"epoch {epoch}: valid loss {valid_loss:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
