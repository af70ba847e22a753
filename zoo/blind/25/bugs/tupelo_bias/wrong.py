"""Feed-forward regression with Megatron-style column and row parallel layers, written out by hand."""
import math
import os
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous().clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


def full_linear(out_features, in_features, gen):
    bound = 1 / math.sqrt(in_features)
    weight = (torch.rand(out_features, in_features, generator=gen) * 2 - 1) * bound
    bias = (torch.rand(out_features, generator=gen) * 2 - 1) * bound
    return weight, bias


class ColumnParallel(nn.Module):
    def __init__(self, in_features, out_features, gen):
        super().__init__()
        w, b = full_linear(out_features, in_features, gen)
        rank, world = dist.get_rank(), dist.get_world_size()
        self.weight = nn.Parameter(w.chunk(world, dim=0)[rank].clone())
        self.bias = nn.Parameter(b.chunk(world)[rank].clone())

    def forward(self, x):
        return F.linear(CopyToRanks.apply(x), self.weight, self.bias)


class RowParallel(nn.Module):
    def __init__(self, in_features, out_features, gen):
        super().__init__()
        w, b = full_linear(out_features, in_features, gen)
        rank, world = dist.get_rank(), dist.get_world_size()
        self.weight = nn.Parameter(w.chunk(world, dim=1)[rank].clone())
        self.bias = nn.Parameter(b)

    def forward(self, x):
        return SumOverRanks.apply(F.linear(x, self.weight, self.bias))


class ParallelMLP(nn.Module):
    def __init__(self, d_in, width, seed):
        super().__init__()
        gen = torch.Generator().manual_seed(seed)
        self.up1, self.down1 = ColumnParallel(d_in, width, gen), RowParallel(width, 24, gen)
        self.up2, self.down2 = ColumnParallel(24, width, gen), RowParallel(width, 1, gen)

    def forward(self, x):
        h = torch.tanh(self.down1(F.silu(self.up1(x))))
        return self.down2(F.silu(self.up2(h))).squeeze(-1)


def surface(n, seed):
    rng = np.random.default_rng(seed)
    x = rng.random((n, 6))
    y = np.sin(np.pi * x[:, 0] * x[:, 1]) * 2 + (x[:, 2] - 0.5) ** 2 * 6 + x[:, 3] - x[:, 4]
    y = y + 0.05 * rng.standard_normal(n)
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32)


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank = dist.get_rank()
    x, y = surface(1200, seed=40)
    net = ParallelMLP(6, 64, seed=41)
    opt = torch.optim.Adam(net.parameters(), lr=8e-3)
    draw = torch.Generator().manual_seed(42)
    for step in range(1, 61):
        idx = torch.randint(1000, (80,), generator=draw)
        loss = F.mse_loss(net(x[idx]), y[idx])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if rank == 0 and step % 15 == 0:
            print(f"step {step} mse {loss.item():.5f}", flush=True)
    with torch.no_grad():
        final = F.mse_loss(net(x[1000:]), y[1000:]).item()
    if rank == 0:
        print(f"held-out mse {final:.6f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
