"""DeepONet for the heat equation with tensor parallelism (DTensor): every rank sees the whole batch."""
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

SENSORS = 32
MODES = 5
DIFFUSIVITY = 0.02


def heat_samples(count, generator):
    """Initial profiles at the sensors, query points (x, t) and the exact solution there."""
    k = torch.arange(1, MODES + 1)
    amp = torch.randn(count, MODES, generator=generator) / k
    grid = torch.linspace(0, 1, SENSORS + 2)[1:-1]
    u0 = amp @ torch.sin(math.pi * k[:, None] * grid)
    points = torch.rand(count, 2, generator=generator)
    x, t = points[:, :1], points[:, 1:]
    decay = torch.exp(-DIFFUSIVITY * (math.pi * k) ** 2 * t)
    u = (amp * decay * torch.sin(math.pi * k * x)).sum(1)
    return u0, points, u


class Mlp(nn.Module):
    def __init__(self, n_in, hidden, n_out):
        super().__init__()
        self.up = nn.Linear(n_in, hidden)
        self.down = nn.Linear(hidden, n_out)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


class DeepONet(nn.Module):
    def __init__(self, hidden=64, latent=24):
        super().__init__()
        self.branch = Mlp(SENSORS, hidden, latent)
        self.refine = Mlp(latent, hidden, latent)
        self.norm = nn.LayerNorm(latent)
        self.trunk = Mlp(2, hidden, latent)
        self.trunk_out = Mlp(latent, hidden, latent)
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, u0, points):
        b = self.branch(u0)
        b = b + self.refine(self.norm(b))
        t = self.trunk_out(torch.sin(self.trunk(points)))
        return (b * t).sum(-1) / math.sqrt(b.shape[-1]) + self.bias


def main():
    if os.environ.get("WORLD_SIZE"):
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))

    torch.manual_seed(31)
    model = DeepONet()
    plan = {}
    for name in ("branch", "refine", "trunk", "trunk_out"):
        plan[f"{name}.up"] = ColwiseParallel()
        plan[f"{name}.down"] = RowwiseParallel()
    parallelize_module(model, mesh, plan)

    data = torch.Generator().manual_seed(77)
    train = heat_samples(1024, data)
    test = heat_samples(512, data)
    opt = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=False)
    sched = torch.optim.lr_scheduler.ExponentialLR(opt, gamma=0.85)

    for epoch in range(4):
        perm = torch.randperm(1024, generator=data)
        running = 0.0
        for rows in perm.split(128):
            u0, points, u = (t[rows] for t in train)
            loss = (model(u0, points) - u).square().mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            running += loss.item() / 8
        sched.step()
        with torch.no_grad():
            err = model(test[0], test[1]) - test[2]
            rel = (err.norm() / test[2].norm()).item()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {running:.6f}  relative error {rel:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
