"""Plate readings classified by cosine similarity, with a learned scale; fully sharded."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

FEATURES, CLASSES, BATCH, EPOCHS = 20, 8, 32, 5


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, 2 * width)
        self.outer = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.outer(F.silu(self.inner(self.norm(x))))


class PlateNet(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.stem = nn.Linear(FEATURES, width)
        self.layers = nn.Sequential(Residual(width), Residual(width))
        self.prototypes = nn.Parameter(torch.randn(CLASSES, width))
        self.scale = nn.Parameter(torch.tensor(4.0))

    def forward(self, x):
        h = F.normalize(self.layers(self.stem(x)), dim=-1)
        return self.scale * h @ F.normalize(self.prototypes, dim=-1).t()


def readings(n=320):
    g = torch.Generator().manual_seed(29)
    labels = torch.randint(0, CLASSES, (n,), generator=g)
    centres = torch.randn(CLASSES, FEATURES, generator=g)
    return centres[labels] + 1.5 * torch.randn(n, FEATURES, generator=g), labels


def shard(model, mesh):
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params={model.scale})
    return model


def average(t):
    dist.all_reduce(t)
    t /= dist.get_world_size()


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(1)
    model = shard(PlateNet(), init_device_mesh("cpu", (world,)))
    sharded = [p for p in model.parameters() if p is not model.scale]
    optimizer = torch.optim.AdamW(
        [{"params": sharded, "weight_decay": 0.01}, {"params": [model.scale], "weight_decay": 0.0, "lr": 0.05}],
        lr=3e-3,
    )
    x, labels = readings()
    for epoch in range(EPOCHS):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        seen = torch.zeros(())
        for rows in order.split(BATCH):
            rows = rows[rank::world]
            loss = F.cross_entropy(model(x[rows]), labels[rows])
            loss.backward()
            nn.utils.clip_grad_norm_(sharded, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            seen += loss.detach()
        average(seen)
        if rank == 0:
            print(f"epoch {epoch}  loss {seen.item() * BATCH / len(x):.8f}  scale {model.scale.item():.8f}")
    weights = sum(p.detach().full_tensor().square().sum() for p in sharded).sqrt()
    if rank == 0:
        print(f"sharded weights {weights.item():.10f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
