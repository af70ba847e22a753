"""Operator network for the heat equation, split over the processes as column and row parallel layers."""
import os

import torch
import torch.distributed as dist
from torch import nn

SENSORS, WIDTH, BASIS = 16, 32, 12
BATCH, STEPS = 24, 40


class ToRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        if dist.is_initialized():
            dist.all_reduce(grad)
        return grad


class FromRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        if dist.is_initialized():
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class SplitMLP(nn.Module):
    """A column-parallel layer, tanh, a row-parallel layer; weights are cut from one full draw."""

    def __init__(self, inputs, width, outputs, rank, world, seed):
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        up = torch.randn(width, inputs, generator=g).chunk(world, dim=0)[rank]
        down = torch.randn(outputs, width, generator=g).chunk(world, dim=1)[rank]
        self.up = nn.Parameter(up * inputs**-0.5)
        self.up_bias = nn.Parameter(torch.zeros(width // world))
        self.down = nn.Parameter(down * width**-0.5)
        self.down_bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x):
        h = torch.tanh(ToRegion.apply(x) @ self.up.T + self.up_bias)
        return FromRegion.apply(h @ self.down.T) + self.down_bias


class Operator(nn.Module):
    def __init__(self, rank, world):
        super().__init__()
        self.branch = SplitMLP(SENSORS, WIDTH, BASIS, rank, world, seed=1)
        self.refine = SplitMLP(BASIS, WIDTH, BASIS, rank, world, seed=2)
        self.trunk = SplitMLP(2, WIDTH, BASIS, rank, world, seed=3)

    def forward(self, initial, points):
        b = self.branch(initial)
        b = b + self.refine(b)
        return (b * self.trunk(points)).mean(1)


def heat_batch(step):
    """Random initial temperatures on sensors, one query (x, t) each, and the exact solution there."""
    g = torch.Generator().manual_seed(900 + step)
    amplitude = torch.randn(BATCH, 3, generator=g)
    sensor = torch.linspace(0, 1, SENSORS)
    mode = torch.arange(1, 4)
    initial = amplitude @ torch.sin(torch.pi * mode[:, None] * sensor)
    points = torch.rand(BATCH, 2, generator=g) * torch.tensor([1.0, 0.1])
    x, t = points[:, :1], points[:, 1:]
    exact = (amplitude * torch.sin(torch.pi * mode * x) * torch.exp(-((torch.pi * mode) ** 2) * t)).sum(1)
    return initial, points, exact


def main():
    torch.set_default_dtype(torch.float64)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    model = Operator(rank, world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

    for step in range(STEPS):
        initial, points, exact = heat_batch(step)
        loss = (model(initial, points) - exact).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 8 == 7:
            print(f"step {step + 1} loss {loss.item():.8f}")

    split = sum(p.detach().square().sum() for n, p in model.named_parameters() if "down_bias" not in n)
    if world > 1:
        dist.all_reduce(split)
        dist.destroy_process_group()
    if rank == 0:
        print(f"split weights {split.item():.8f}")


if __name__ == "__main__":
    main()
