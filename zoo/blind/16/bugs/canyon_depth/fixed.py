"""Depth of a canyon from position: residual network, sharded inside a node and replicated between nodes."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

torch.set_default_dtype(torch.float64)


def prepare():
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group("gloo")
    world = dist.get_world_size()
    per_node = int(os.environ.get("SHARD_SIZE", max(world // 2, 1)))
    return init_device_mesh("cpu", (world // per_node, per_node), mesh_dim_names=("replicate", "shard"))


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.one = nn.Linear(width, 2 * width)
        self.two = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.two(F.silu(self.one(self.norm(x))))


class DepthNet(nn.Module):
    def __init__(self, width=24, depth=3):
        super().__init__()
        self.register_buffer("waves", torch.linspace(0.5, 4, 12))
        self.stem = nn.Linear(48, width)
        self.blocks = nn.ModuleList([Residual(width) for _ in range(depth)])
        self.head = nn.Linear(width, 1)

    def forward(self, place):
        angle = (place[:, :, None] * self.waves).flatten(1)
        x = self.stem(torch.cat([angle.sin(), angle.cos()], 1))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def shard(model, mesh):
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def survey(n, seed):
    g = torch.Generator().manual_seed(seed)
    place = torch.rand(n, 2, generator=g) * 4 - 2
    river = 0.6 * torch.sin(1.5 * place[:, 0])
    depth = torch.exp(-4 * (place[:, 1] - river) ** 2) + 0.2 * torch.cos(3 * place[:, 0])
    return place, (depth + 0.02 * torch.randn(n, generator=g))[:, None]


def main():
    mesh = prepare()
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(8)
    model = shard(DepthNet(), mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    place, depth = survey(1024, 1)
    order = torch.Generator().manual_seed(31)
    for epoch in range(4):
        total = torch.zeros(())
        for batch in torch.randperm(len(place), generator=order).split(64):
            mine = batch.chunk(world)[rank]
            loss = F.smooth_l1_loss(model(place[mine]), depth[mine], beta=0.2)
            loss.backward()
            opt.step()
            opt.zero_grad()
            total += loss.detach() * len(mine)
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch} loss {total / len(place):.9f}")
    place, depth = survey(256, 2)
    with torch.no_grad():
        error = (model(place) - depth).abs().mean()
    if rank == 0:
        print(f"mean error {error:.9f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
