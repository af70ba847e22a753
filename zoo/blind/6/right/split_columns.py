"""A wide hidden layer cut by columns; every rank reads the same rows and never exchanges gradients."""
import argparse
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import make_moons
from torch import nn


class CopyIn(torch.autograd.Function):
    """Identity forwards; sums what comes back from the parts of the layer."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        dy = dy.contiguous().clone()
        dist.all_reduce(dy)
        return dy


class SumOut(torch.autograd.Function):
    """Sums the partial results forwards; identity backwards."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, dy):
        return dy


class WideBlock(nn.Module):
    def __init__(self, dim, hidden, rank, world):
        super().__init__()
        a, b = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        with torch.no_grad():
            self.w1 = nn.Parameter(a.weight.chunk(world)[rank].clone())
            self.b1 = nn.Parameter(a.bias.chunk(world)[rank].clone())
            self.w2 = nn.Parameter(b.weight.chunk(world, dim=1)[rank].clone())
            self.b2 = nn.Parameter(b.bias.clone())

    def forward(self, x):
        h = F.gelu(F.linear(CopyIn.apply(x), self.w1, self.b1))
        return x + SumOut.apply(F.linear(h, self.w2)) + self.b2


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=50)
    ap.add_argument("--hidden", type=int, default=96)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = make_moons(1000, noise=0.15, random_state=1)
    x, y = torch.tensor(x, dtype=torch.float32), torch.tensor(y)
    torch.manual_seed(10)
    model = nn.Sequential(nn.Linear(2, 16), WideBlock(16, args.hidden, rank, world), nn.LayerNorm(16),
                          WideBlock(16, args.hidden, rank, world), nn.Linear(16, 2))
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    g = torch.Generator().manual_seed(0)
    for step in range(1, args.steps + 1):
        rows = torch.randint(1000, (64,), generator=g)
        loss = F.cross_entropy(model(x[rows]), y[rows])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 10 == 0 and rank == 0:
            print(f"step {step} loss {loss.item():.5f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
