"""Tensor parallel with DTensor, sequence parallel between the matrix products."""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

DIM, HIDDEN, SEQ, BATCH, DEPTH, STEPS = 16, 48, 32, 12, 2, 16


class Mixer(nn.Module):
    """norm and residual on this process's part of the sequence, the products on split weights"""

    def __init__(self, mesh):
        super().__init__()
        self.mesh = mesh
        self.norm = nn.LayerNorm(DIM)
        self.time = nn.Parameter(torch.eye(SEQ) + 0.05 * torch.randn(SEQ, SEQ).tril())
        up, down = torch.randn(HIDDEN, DIM) / DIM ** 0.5, torch.randn(DIM, HIDDEN) / HIDDEN ** 0.5
        self.up = nn.Parameter(distribute_tensor(up, mesh, [Shard(0)]))
        self.down = nn.Parameter(distribute_tensor(down, mesh, [Shard(1)]))

    def forward(self, x):
        h = self.norm(x)
        h = DTensor.from_local(h, self.mesh, [Shard(1)]).redistribute(placements=[Replicate()])
        time_mix = DTensor.from_local(self.time, self.mesh, [Replicate()])
        h = torch.matmul(time_mix, h)
        h = torch.matmul(F.relu(torch.matmul(h, self.up.t())), self.down.t())
        return x + h.redistribute(placements=[Shard(1)]).to_local()


class Forecaster(nn.Module):
    def __init__(self, mesh):
        super().__init__()
        self.embed = nn.Linear(3, DIM)
        self.blocks = nn.ModuleList(Mixer(mesh) for _ in range(DEPTH))
        self.head = nn.Linear(DIM, 3)

    def forward(self, x):
        x = self.embed(x)
        for b in self.blocks:
            x = b(x)
        return self.head(x)

    def outside(self):
        """parameters that each process applies to its own part of the sequence"""
        return [*self.embed.parameters(), *self.head.parameters()]


def waves(gen):
    t = torch.arange(SEQ + 1) / 6
    phase, speed = torch.rand(BATCH, 1, 3, generator=gen) * 6, 0.5 + torch.rand(BATCH, 1, 3, generator=gen)
    s = torch.sin(t[None, :, None] * speed + phase)
    return s[:, :-1], s[:, 1:]


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    torch.manual_seed(51)
    model = Forecaster(mesh)
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=False)
    gen = torch.Generator().manual_seed(52)
    n = SEQ // world
    for step in range(STEPS):
        x, y = (t[:, rank * n:(rank + 1) * n] for t in waves(gen))
        loss = (model(x) - y).pow(2).sum() / (BATCH * SEQ * 3)
        opt.zero_grad()
        loss.backward()
        for p in model.outside():
            dist.all_reduce(p.grad, group=mesh.get_group("tp"))
        opt.step()
        if step % 4 == 3:
            total = loss.detach().clone()
            dist.all_reduce(total)
            if rank == 0:
                print(f"step {step + 1}: mse {total.item():.6f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
