"""Batch normalisation over processes that get unlike shares of every batch."""
import argparse
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class SumOverGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t):
        t = t.clone()
        dist.all_reduce(t)
        return t

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        dist.all_reduce(g)
        return g


class GroupBatchNorm(nn.Module):
    def __init__(self, width, momentum=0.1, eps=1e-5):
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.momentum, self.eps = momentum, eps
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("var", torch.ones(width))

    def forward(self, x):
        if self.training:
            n = x.new_tensor([float(x.shape[0])])
            packed = SumOverGroup.apply(torch.cat([x.sum(0), x.square().sum(0), n]))
            total = packed[-1].detach()
            mean, second = (packed[:-1] / total).chunk(2)
            var = second - mean.square()
            with torch.no_grad():
                self.mean.lerp_(mean, self.momentum)
                self.var.lerp_(var * total / (total - 1), self.momentum)
        else:
            mean, var = self.mean, self.var
        return (x - mean) * torch.rsqrt(var + self.eps) * self.gain + self.shift


def shares(n, world):
    """The first process takes about twice as much as the others."""
    weights = np.array([2.0] + [1.0] * (world - 1))
    edges = np.round(np.cumsum(weights) / weights.sum() * n).astype(int)
    return [0, *edges.tolist()]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch", type=int, default=61)
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--lr", type=float, default=0.1)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(6)
    net = nn.Sequential(nn.Linear(64, 48), GroupBatchNorm(48), nn.ReLU(), nn.Linear(48, 48), GroupBatchNorm(48),
                        nn.ReLU(), nn.Linear(48, 10))
    ddp = DDP(net, broadcast_buffers=False)
    opt = torch.optim.SGD(ddp.parameters(), lr=args.lr, momentum=0.8)
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
    edges = shares(args.batch, world)
    gen = torch.Generator().manual_seed(30)
    for step in range(args.steps):
        ids = torch.randint(0, 1300, (args.batch,), generator=gen)[edges[rank]:edges[rank + 1]]
        loss = F.cross_entropy(ddp(x[ids]), y[ids], reduction="sum") * world / args.batch
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 10 == 9:
            mean = loss.detach() / world
            dist.all_reduce(mean)
            net.eval()
            with torch.no_grad():
                val = F.cross_entropy(net(x[1300:]), y[1300:])
            net.train()
            if rank == 0:
                print(f"{step + 1} train {mean:.6f} validation {val:.6f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
