"""Two-layer tensor-parallel feed-forward blocks written by hand (column split, then row split)."""
import math
import os
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F


@dataclass
class Config:
    dim: int = 24
    hidden: int = 64
    depth: int = 3
    steps: int = 48
    batch: int = 96
    lr: float = 0.08
    seed: int = 21


cfg = Config()


class CopyIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        dist.all_reduce(g)
        return g


class ReduceOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g


def full_weight(rows, cols, gen):
    return (torch.rand(rows, cols, generator=gen) * 2 - 1) / math.sqrt(cols)


class ColumnLinear(nn.Module):
    def __init__(self, fan_in, fan_out, gen):
        super().__init__()
        r, w = dist.get_rank(), dist.get_world_size()
        self.weight = nn.Parameter(full_weight(fan_out, fan_in, gen).chunk(w, 0)[r].clone())
        self.bias = nn.Parameter(torch.zeros(fan_out // w))

    def forward(self, x):
        return F.linear(CopyIn.apply(x), self.weight, self.bias)


class RowLinear(nn.Module):
    def __init__(self, fan_in, fan_out, gen):
        super().__init__()
        r, w = dist.get_rank(), dist.get_world_size()
        self.weight = nn.Parameter(full_weight(fan_out, fan_in, gen).chunk(w, 1)[r].clone())
        self.bias = nn.Parameter(torch.zeros(fan_out))

    def forward(self, x):
        return ReduceOut.apply(F.linear(x, self.weight, self.bias))


class Tower(nn.Module):
    def __init__(self, gen):
        super().__init__()
        self.ups = nn.ModuleList(ColumnLinear(cfg.dim, cfg.hidden, gen) for _ in range(cfg.depth))
        self.downs = nn.ModuleList(RowLinear(cfg.hidden, cfg.dim, gen) for _ in range(cfg.depth))
        self.out = nn.Parameter(full_weight(1, cfg.dim, gen))

    def forward(self, x):
        for up, down in zip(self.ups, self.downs):
            x = x + down(torch.tanh(up(x)))
        return F.linear(x, self.out).squeeze(-1)


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    gen = torch.Generator().manual_seed(cfg.seed)
    x = torch.randn(512, cfg.dim, generator=gen)
    y = x[:, 0] * x[:, 1] - 0.5 * x[:, 2] ** 2 + 1.0   # a saddle, off centre
    model = Tower(gen)
    opt = torch.optim.SGD(model.parameters(), lr=cfg.lr)
    for step in range(1, cfg.steps + 1):
        rows = torch.randint(0, 512, (cfg.batch,), generator=gen)
        loss = F.smooth_l1_loss(model(x[rows]), y[rows])
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        if step % 12 == 0 and dist.get_rank() == 0:
            print(f"{step:3d}  {loss.item():.6f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


main()
