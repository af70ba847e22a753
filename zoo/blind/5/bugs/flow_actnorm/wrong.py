"""Density estimation on the breast-cancer table with a small coupling flow (Glow-like) under DDP."""
import argparse
import math
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_breast_cancer
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class ActNorm(nn.Module):
    """Scale and shift per feature; the first batch gives zero mean and unit variance."""

    def __init__(self, dim):
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(dim))
        self.shift = nn.Parameter(torch.zeros(dim))
        self.ready = False

    @torch.no_grad()
    def initialise(self, x):
        x = x.double()
        stats = torch.cat([x.sum(0), x.square().sum(0), x.new_full((1,), len(x))])
        total, square, count = stats.split([x.shape[1], x.shape[1], 1])
        mean = total / count
        var = (square / count - mean.square()).clamp_min(1e-4)
        self.shift.copy_(-mean)
        self.log_scale.copy_(-0.5 * var.log())
        self.ready = True

    def forward(self, x):
        if not self.ready:
            self.initialise(x)
        return (x + self.shift) * self.log_scale.exp(), self.log_scale.sum()


class Coupling(nn.Module):
    def __init__(self, dim, hidden, flip):
        super().__init__()
        self.half, self.flip = dim // 2, flip
        self.net = nn.Sequential(nn.Linear(self.half, hidden), nn.ReLU(), nn.Linear(hidden, 2 * (dim - self.half)))
        nn.init.zeros_(self.net[-1].weight)
        nn.init.zeros_(self.net[-1].bias)

    def forward(self, x):
        if self.flip:
            x = x.flip(1)
        a, b = x[:, :self.half], x[:, self.half:]
        s, t = self.net(a).chunk(2, 1)
        s = torch.tanh(s)
        return torch.cat([a, b * s.exp() + t], 1), s.sum(1)


class Flow(nn.Module):
    def __init__(self, dim, hidden, depth):
        super().__init__()
        self.norms = nn.ModuleList(ActNorm(dim) for _ in range(depth))
        self.couplings = nn.ModuleList(Coupling(dim, hidden, i % 2 == 1) for i in range(depth))

    def forward(self, x):
        logdet = x.new_zeros(len(x))
        for norm, coupling in zip(self.norms, self.couplings):
            x, ld = norm(x)
            logdet = logdet + ld
            x, ld = coupling(x)
            logdet = logdet + ld
        prior = -0.5 * (x.square() + math.log(2 * math.pi)).sum(1)
        return prior + logdet


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch", type=int, default=64, help="samples per step over all processes")
    ap.add_argument("--hidden", type=int, default=48)
    ap.add_argument("--depth", type=int, default=4)
    ap.add_argument("--lr", type=float, default=0.1)
    args = ap.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(11)

    table = torch.tensor(load_breast_cancer().data, dtype=torch.float32)
    table = table.clamp_min(1e-3).log()
    data = TensorDataset(table)
    sampler = DistributedSampler(data, world, rank, shuffle=True, seed=3, drop_last=True)
    loader = DataLoader(data, batch_size=args.batch // world, sampler=sampler, drop_last=True)

    flow = DDP(Flow(table.shape[1], args.hidden, args.depth))
    opt = torch.optim.SGD(flow.parameters(), lr=args.lr, momentum=0.9)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        seen = torch.zeros(2)
        for (x,) in loader:
            nll = -flow(x).mean() / x.shape[1]
            opt.zero_grad()
            nll.backward()
            nn.utils.clip_grad_norm_(flow.parameters(), 0.5)
            opt.step()
            seen += torch.tensor([nll.item(), 1.0])
        dist.all_reduce(seen)
        if rank == 0:
            print(f"epoch {epoch}: {seen[0] / seen[1]:.4f} nats per feature")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
