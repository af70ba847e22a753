"""Batch-normalised network with validation on the first rank after every epoch."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def rings(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 2, generator=g)
    return TensorDataset(x, (x.norm(dim=1) > 1.2).long())


@torch.no_grad()
def evaluate(net, dataset):
    net.eval()
    right = 0
    for x, y in DataLoader(dataset, batch_size=25):
        right += (net(x).argmax(1) == y).sum().item()
    net.train()
    return right / len(dataset)


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    torch.manual_seed(0)
    train_set, valid_set = rings(192, 1), rings(100, 2)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=16, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(2, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        if dist.get_rank() == 0:
            accuracy = evaluate(model.module, valid_set)
            print(f"epoch {epoch}: accuracy {accuracy:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
