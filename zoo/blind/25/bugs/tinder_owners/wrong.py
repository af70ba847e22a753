"""Fire danger regression with a small ZeRO-1: every parameter has one owner that keeps its Adam state.

A fixed random projection in the middle of the network is not trained.
"""
import os
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


def stations(n=900, seed=70):
    rng = np.random.default_rng(seed)
    temp, wind, rain, slope, fuel = rng.random((5, n))
    danger = np.exp(1.5 * temp * wind - 2.0 * rain) + 0.7 * fuel * slope + 0.4 * np.sin(6 * fuel)
    danger = danger + 0.05 * rng.standard_normal(n)
    x = np.stack([temp, wind, rain, slope, fuel], 1) * 2 - 1
    return torch.tensor(x, dtype=torch.float32), torch.tensor(danger, dtype=torch.float32)


class DangerNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.inlet = nn.Linear(5, 32)
        self.project = nn.Linear(32, 64, bias=False)
        self.project.weight.requires_grad_(False)
        self.mid = nn.Linear(64, 32)
        self.norm = nn.LayerNorm(32)
        self.out = nn.Linear(32, 1)

    def forward(self, x):
        h = torch.cos(self.project(torch.tanh(self.inlet(x))))
        return self.out(F.relu(self.norm(self.mid(h)))).squeeze(-1)


class OwnedAdam:
    def __init__(self, params, lr, rank, world):
        self.params = list(params)
        self.rank, self.world = rank, world
        mine = [p for i, p in enumerate(self.params) if i % world == rank and p.requires_grad]
        self.inner = torch.optim.Adam(mine, lr=lr) if mine else None

    def zero_grad(self):
        for p in self.params:
            p.grad = None

    def average(self):
        for p in self.params:
            if p.grad is not None:
                dist.all_reduce(p.grad)
                p.grad /= self.world

    def publish(self):
        for i, p in enumerate(q for q in self.params if q.requires_grad):
            dist.broadcast(p.data, src=i % self.world)

    def step(self):
        self.average()
        if self.inner is not None:
            self.inner.step()
        self.publish()


def main(steps=50, batch=60):
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = stations()
    torch.manual_seed(71)
    net = DangerNet()
    opt = OwnedAdam(net.parameters(), 1e-2, rank, world)
    draw = torch.Generator().manual_seed(72)
    for step in range(1, steps + 1):
        idx = torch.randperm(700, generator=draw)[:batch][rank::world]
        loss = F.mse_loss(net(x[idx]), y[idx])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 10 == 0:
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step} mse {shown.item() / world:.5f}", flush=True)
    with torch.no_grad():
        final = F.mse_loss(net(x[700:]), y[700:]).item()
    if rank == 0:
        print(f"validation mse {final:.6f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
