"""Denoising diffusion of points on two circles; hybrid sharding (copies x shards)."""
import math
import os
import time

import torch
import torch.distributed as dist
from sklearn.datasets import make_circles
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

T = 50
BETA = torch.linspace(1e-4, 0.08, T, dtype=torch.float64)
ALPHA_BAR = torch.cumprod(1 - BETA, 0)


class Denoiser(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.first = nn.Linear(2 + 8, width)
        self.body = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.last = nn.Linear(width, 2)

    def forward(self, x, t):
        freq = torch.exp(torch.arange(4, dtype=x.dtype) * -math.log(10.0) / 2)
        angle = t[:, None].to(x.dtype) * freq
        h = torch.nn.functional.silu(self.first(torch.cat([x, angle.sin(), angle.cos()], 1)))
        for layer in self.body:
            h = h + torch.nn.functional.silu(layer(h))
        return self.last(h)


def shard(net, world):
    copies = 2 if world > 1 else 1
    mesh = init_device_mesh("cpu", (copies, world // copies), mesh_dim_names=("copies", "shards"))
    for layer in net.body:
        fully_shard(layer, mesh=mesh["shards"])
    fully_shard(net, mesh=mesh["shards"])
    return net


def noised_batch(points, g, batch):
    x0 = points[torch.randint(0, len(points), (batch,), generator=g)]
    t = torch.randint(0, T, (batch,), generator=g)
    eps = torch.randn(batch, 2, generator=g, dtype=torch.float64)
    a = ALPHA_BAR[t][:, None]
    return a.sqrt() * x0 + (1 - a).sqrt() * eps, t, eps


def main(batch=64, steps=50):
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    points = torch.tensor(make_circles(800, noise=0.03, factor=0.4, random_state=2)[0])
    torch.manual_seed(12)
    net = shard(Denoiser().double(), world)
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    g = torch.Generator().manual_seed(99)
    for step in range(steps):
        xt, t, eps = (v[rank::world] for v in noised_batch(points, g, batch))
        loss = ((net(xt, t) - eps) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            if rank == 0:
                print(f"{step:3d} {shown.item() / world:.6f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
