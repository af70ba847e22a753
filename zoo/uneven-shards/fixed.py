"""Trains on contiguous shards of a table, one per rank."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset


def shard(dataset, rank, world_size):
    size = len(dataset) - len(dataset) % (world_size * 16)
    return Subset(dataset, range(rank, size, world_size))


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x = torch.randn(225, 6)
    dataset = TensorDataset(x, x.pow(2).sum(1, keepdim=True))
    mine = shard(dataset, rank, world_size)
    generator = torch.Generator().manual_seed(4 + rank)
    loader = DataLoader(mine, batch_size=16, shuffle=True, generator=generator)
    model = DDP(nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for epoch in range(2):
        for bx, by in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(bx), by)
            loss.backward()
            optimizer.step()
        print(f"rank {rank}, epoch {epoch}: {len(loader)} batches, loss {loss.item():.4f}")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
