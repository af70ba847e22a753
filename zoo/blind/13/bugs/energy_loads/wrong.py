"""Heating and cooling load of buildings from their shape: one network, two outputs."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


def buildings(count, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(count, 6, generator=g)
    heat = 2 * x[:, 0] * x[:, 1] + torch.sin(4 * x[:, 2]) + 0.5 * x[:, 3]
    cool = 1.5 * x[:, 0] - x[:, 4] ** 2 + torch.cos(3 * x[:, 5]) * x[:, 2]
    noise = 0.1 * torch.randn(count, 2, generator=g)
    return x, torch.stack([heat, cool], dim=1) + noise


class Loads(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.out = nn.Linear(width, 2)

    def forward(self, x):
        y = self.out(self.body(x))
        return y[:, 0], y[:, 1]


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=5)
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--cool-weight", type=float, default=2.0)
    args = p.parse_args()

    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x, y = buildings(512, seed=4)
    model = DDP(Loads())
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, eps=1e-4)
    huber = nn.HuberLoss(delta=0.5)

    for epoch in range(args.epochs):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(100 + epoch))
        sums = torch.zeros(2)
        for rows in order.split(args.batch):
            rows = rows[rank::world]
            heat, cool = model(x[rows])
            heat_loss = huber(heat, y[rows, 0])
            cool_loss = huber(cool, y[rows, 1])
            opt.zero_grad(set_to_none=True)
            heat_loss.backward(retain_graph=True)
            (args.cool_weight * cool_loss).backward()
            opt.step()
            sums += torch.stack([heat_loss.detach(), cool_loss.detach()]) * len(rows)
        dist.all_reduce(sums)
        if rank == 0:
            print(f"epoch {epoch} heating {sums[0] / len(x):.4f} cooling {sums[1] / len(x):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
