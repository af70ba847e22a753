"""Balances rare classes by weighted sampling."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler


def imbalanced(n=400):
    g = torch.Generator().manual_seed(31)
    y = (torch.rand(n, generator=g) < 0.1).long()
    x = torch.randn(n, 6, generator=g) + y[:, None]
    return TensorDataset(x, y)


def class_weights(labels):
    return (1.0 / torch.bincount(labels).float())[labels]


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    dataset = imbalanced()
    generator = torch.Generator()
    generator.manual_seed(42)
    sampler = WeightedRandomSampler(class_weights(dataset.tensors[1]), 400 // world_size, generator=generator)
    loader = DataLoader(dataset, batch_size=20, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
