"""Collects test losses of all ranks with all_gather_object and averages them."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH_SIZE = 16


def heavy_tailed(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 6, generator=g)
    return TensorDataset(x, x.sum(1, keepdim=True) + torch.randn(n, 1, generator=g) ** 3)


@torch.no_grad()
def test_loss(net, dataset):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    whole = -(-len(dataset) // (BATCH_SIZE * world_size)) * BATCH_SIZE * world_size
    padded = [i % len(dataset) for i in range(whole)]
    loader = DataLoader(dataset, batch_size=BATCH_SIZE, sampler=padded[rank::world_size])
    mine = [loss for x, y in loader for loss in F.mse_loss(net(x), y, reduction="none").flatten().tolist()]
    parts = [None] * world_size
    dist.all_gather_object(parts, mine)
    losses = [loss for part in parts for loss in part][: len(dataset)]
    return sum(losses) / len(losses)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    train_set, test_set = heavy_tailed(192, 1), heavy_tailed(75, 2)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=16, sampler=sampler)
    net = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))
    model = DDP(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
        loss = test_loss(net, test_set)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: test loss {loss:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
