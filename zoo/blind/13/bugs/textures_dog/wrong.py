"""Texture classes with hybrid sharding and a step size free optimizer (distance over gradients)."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class DoG(torch.optim.Optimizer):
    """lr = largest distance from the start / root of the sum of squared gradient norms."""

    def __init__(self, params, first=1e-2):
        super().__init__(params, dict(first=first))
        self.start = [[p.detach().to_local().clone() for p in g["params"]] for g in self.param_groups]
        self.far, self.total = 0.0, 0.0

    @torch.no_grad()
    def step(self):
        moved, squares = torch.zeros(()), torch.zeros(())
        for group, start in zip(self.param_groups, self.start):
            for p, s in zip(group["params"], start):
                moved += ((p.to_local() - s) ** 2).sum()
                squares += (p.grad.to_local() ** 2).sum()
        self.far = max(self.far, moved.sqrt().item())
        self.total += squares.item()
        for group in self.param_groups:
            lr = max(self.far, group["first"]) / (self.total + 1e-12) ** 0.5
            for p in group["params"]:
                p.to_local().sub_(lr * p.grad.to_local())


def textures(count, seed, size=10):
    g = torch.Generator().manual_seed(seed)
    kind = torch.randint(5, (count,), generator=g)
    yy, xx = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    angle = (kind * 0.628)[:, None, None]
    shift = 6.28 * torch.rand(count, 1, 1, generator=g)
    image = torch.sin(1.2 * (torch.cos(angle) * xx + torch.sin(angle) * yy) + shift)
    return (image + 0.5 * torch.randn(count, size, size, generator=g)).flatten(1), kind


def make_mesh(world):
    shard = 2 if world % 2 == 0 else 1
    return init_device_mesh("cpu", (world // shard, shard), mesh_dim_names=("replicate", "shard"))


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=6)
    p.add_argument("--batch", type=int, default=64)
    args = p.parse_args()

    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(31)
    x, y = textures(640, seed=1)
    model = nn.Sequential(
        nn.Sequential(nn.Linear(100, 64), nn.GELU()),
        nn.Sequential(nn.Linear(64, 64), nn.GELU()),
        nn.Linear(64, 5),
    )
    mesh = make_mesh(world)
    for part in model:
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = DoG(model.parameters())

    for epoch in range(args.epochs):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        total = torch.zeros(())
        for rows in order.split(args.batch):
            rows = rows[rank::world]
            loss = F.cross_entropy(model(x[rows]), y[rows])
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.detach() * len(rows)
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch} loss {total.item() / len(x):.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
