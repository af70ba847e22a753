"""Normalising flow on a table of wine measurements; the scale layers start from the first batch."""
import argparse
import math
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_wine
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class ActNorm(nn.Module):
    """Per-feature affine map. The first batch sets it so that its output has mean 0 and variance 1."""

    def __init__(self, dim):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(dim))
        self.log_scale = nn.Parameter(torch.zeros(dim))
        self.ready = False

    @torch.no_grad()
    def start(self, x):
        x = x.double()
        moments = torch.stack([x.mean(0), (x ** 2).mean(0)])
        mean, var = moments[0], moments[1] - moments[0] ** 2
        self.shift.copy_(-mean)
        self.log_scale.copy_(-0.5 * torch.log(var + 1e-4))
        self.ready = True

    def forward(self, x):
        if not self.ready:
            self.start(x)
        return (x + self.shift) * self.log_scale.exp(), self.log_scale.sum()


class Coupling(nn.Module):
    def __init__(self, dim, hidden, flip):
        super().__init__()
        self.k, self.flip = dim // 2, flip
        self.net = nn.Sequential(nn.Linear(self.k, hidden), nn.ReLU(), nn.Linear(hidden, 2 * (dim - self.k)))

    def forward(self, x):
        if self.flip:
            x = x.flip(1)
        a, b = x[:, :self.k], x[:, self.k:]
        s, t = self.net(a).chunk(2, dim=1)
        s = torch.tanh(s)
        return torch.cat([a, b * s.exp() + t], 1), s.sum(1)


class Flow(nn.Module):
    def __init__(self, dim, hidden=32, depth=3):
        super().__init__()
        self.layers = nn.ModuleList()
        for i in range(depth):
            self.layers += [ActNorm(dim), Coupling(dim, hidden, flip=i % 2 == 1)]

    def forward(self, x):
        logdet = torch.zeros(len(x))
        for layer in self.layers:
            x, ld = layer(x)
            logdet = logdet + ld
        prior = -0.5 * (x ** 2).sum(1) - 0.5 * x.shape[1] * math.log(2 * math.pi)
        return -(prior + logdet).mean()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--batch", type=int, default=48)
    ap.add_argument("--lr", type=float, default=2e-3)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    data = torch.tensor(load_wine().data, dtype=torch.float32)[:, :12]
    data = data / data.abs().mean(0)
    torch.manual_seed(28)
    flow = DDP(Flow(data.shape[1]))
    opt = torch.optim.Adam(flow.parameters(), lr=args.lr, eps=1e-5)
    draw = torch.Generator().manual_seed(2)
    for step in range(1, args.steps + 1):
        rows = torch.randperm(len(data), generator=draw)[:args.batch]
        loss = flow(data[rows[rank::world]])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 10 == 0:
            nll = loss.detach() / world
            dist.all_reduce(nll)
            if rank == 0:
                print(f"step {step} nll {nll.item():.4f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
