"""Weighted regression with FSDP2 on a two-dimensional mesh (replicate x shard) and gradient accumulation."""
import argparse
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard


@dataclass
class Setup:
    shard: int = 1
    window: int = 120
    micros: int = 3
    epochs: int = 3
    lr: float = 6e-3


def rows(n=1400, d=16):
    g = torch.Generator().manual_seed(31)
    x = torch.randn(n, d, generator=g)
    y = (x[:, :4].prod(1) + x[:, 4:8].sum(1).tanh() + x[:, 8].abs()).unsqueeze(1)
    return x, y, torch.rand(n, 1, generator=g) * 3 + 0.1


class Residual(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.f = nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x):
        return x + self.f(x)


def main(s):
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world // s.shard, s.shard), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(6)
    model = nn.Sequential(nn.Linear(16, 32), Residual(32), Residual(32), nn.Linear(32, 1))
    for part in model:
        if isinstance(part, Residual):
            fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert isinstance(model, FSDPModule)
    opt = torch.optim.AdamW(model.parameters(), lr=s.lr)
    x, y, w = rows()
    for epoch in range(s.epochs):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        epoch_loss = torch.zeros(2)
        for window in order.split(s.window):
            mine = window[rank::world]
            weight = w[mine].sum()
            dist.all_reduce(weight)
            pieces = mine.tensor_split(s.micros)
            for k, piece in enumerate(pieces):
                model.set_requires_gradient_sync(k == len(pieces) - 1)
                loss = (w[piece] * (model(x[piece]) - y[piece]).square()).sum()
                (loss * world / weight).backward()
                epoch_loss[0] += loss.detach()
            epoch_loss[1] += w[mine].sum()
            opt.step()
            opt.zero_grad()
        dist.all_reduce(epoch_loss)
        if rank == 0:
            print(f"epoch {epoch}: weighted mse {epoch_loss[0] / epoch_loss[1]:.5f}")


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    for k, v in vars(Setup()).items():
        ap.add_argument(f"--{k}", type=type(v), default=v)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    main(Setup(**vars(ap.parse_args())))
    time.sleep(0.3)
    dist.destroy_process_group()
