"""A residual MLP with a cosine schedule over all steps."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Residual(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.net = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        return x + self.net(x)


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--global-batch", type=int, default=16)
    p.add_argument("--lr", type=float, default=0.02)
    return p.parse_args()


def main():
    args = get_args()
    dist.init_process_group("gloo")
    world_size = dist.get_world_size()
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(4)
    x = torch.randn(96, 8, generator=g)
    data = TensorDataset(x, torch.sin(x).sum(1, keepdim=True))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, args.global_batch // world_size, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(Residual(8), Residual(8), nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    total_steps = args.epochs * len(loader)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=total_steps)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for inputs, target in loader:
            loss = nn.functional.mse_loss(model(inputs), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} lr {optimizer.param_groups[0]['lr']:.5f} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
