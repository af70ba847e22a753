"""Digits that are kept in four barns, sorted by kind; neighbours (pairs of workers) add up first, then the elders of pairs.

Each barn delivers the same number of pictures to every step, and is read only by the worker that it belongs to.
The clipping threshold is a running quantile of past gradient norms, kept by the head elder.
"""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, IterableDataset

BARNS = {"north": (0, 1, 2), "east": (3, 4), "south": (5, 6, 7), "west": (8, 9)}
PER_BARN, STEPS = 12, 40


class Barn(IterableDataset):
    def __init__(self, name, number):
        d = load_digits()
        kinds = torch.tensor(BARNS[name])
        x, y = torch.tensor(d.data / 16.0, dtype=torch.float32), torch.tensor(d.target)
        keep = torch.isin(y, kinds)
        x, y = x[keep], y[keep]
        self.x, self.y, self.ex, self.ey = x[:-60], y[:-60], x[-60:], y[-60:]
        self.name, self.number = name, number

    def __iter__(self):
        g = torch.Generator().manual_seed(4000 + self.number)
        while True:
            for i in torch.randperm(len(self.x), generator=g).tolist():
                yield self.x[i], self.y[i]


class Village:
    """Two-level sums."""

    def __init__(self, rank, world):
        self.rank, self.world = rank, world
        self.house = self.elders = None
        self.chiefs = list(range(0, world, 2))
        for a in self.chiefs:
            pair = [r for r in (a, a + 1) if r < world]
            if len(pair) > 1:
                g = dist.new_group(pair)
                if rank in pair:
                    self.house = g
        if len(self.chiefs) > 1:
            self.elders = dist.new_group(self.chiefs)
        self.chief = rank - rank % 2

    def sum(self, t):
        if self.house is not None:
            dist.reduce(t, dst=self.chief, group=self.house)
        if self.elders is not None and self.rank in self.chiefs:
            dist.all_reduce(t, group=self.elders)
        if self.house is not None:
            dist.broadcast(t, src=self.chief, group=self.house)
        return t


class HeadElder:
    def __init__(self, quantile=0.5, keep=20):
        self.quantile, self.keep, self.norms = quantile, keep, []

    def factor(self, norm):
        self.norms = (self.norms + [norm])[-self.keep:]
        limit = torch.tensor(self.norms, dtype=torch.float64).quantile(self.quantile).item()
        return min(1.0, limit / (norm + 1e-12))


def main():
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    village = Village(rank, world)
    share = len(BARNS) // world
    mine = [Barn(name, k) for k, name in enumerate(BARNS) if k // share == rank]
    feeds = [iter(DataLoader(b, batch_size=PER_BARN)) for b in mine]

    torch.manual_seed(15)
    net = nn.Sequential(nn.Linear(64, 48), nn.ELU(), nn.Linear(48, 10))
    sizes = [p.numel() for p in net.parameters()]
    opt = torch.optim.SGD(net.parameters(), lr=0.25, momentum=0.8)
    head = HeadElder() if rank == 0 else None

    for step in range(1, STEPS + 1):
        parts = [next(f) for f in feeds]
        x, y = torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])
        opt.zero_grad()
        loss = F.cross_entropy(net(x), y, reduction="sum")
        loss.backward()
        flat = torch.cat([p.grad.flatten() for p in net.parameters()] + [torch.tensor([loss.item(), float(len(y))])])
        village.sum(flat)
        flat = flat / flat[-1].item()
        factor = torch.zeros(1, dtype=torch.float64)
        if head:
            factor[0] = head.factor(flat[:-2].double().norm().item())
        if world > 1:
            dist.broadcast(factor, src=0)
        for p, g in zip(net.parameters(), (flat[:-2] * factor.float()).split(sizes)):
            p.grad.copy_(g.view_as(p))
        opt.step()
        if rank == 0 and step % 8 == 0:
            print(f"step {step}  loss {flat[-2].item():.6f}  clip {factor.item():.5f}  (here {loss.item() / len(y):.5f})",
                  flush=True)

    with torch.no_grad():
        report = {b.name: (net(b.ex).argmax(1) == b.ey).float().mean().item() for b in mine}
    if world > 1:
        boxes = [None] * world
        dist.all_gather_object(boxes, report)
        report = {k: v for box in boxes for k, v in box.items()}
    if rank == 0:
        print("accuracy by barn: " + "  ".join(f"{k} {v:.3f}" for k, v in report.items()), flush=True)
        print(f"worst barn {min(report.values()):.4f}  mean {sum(report.values()) / len(report):.4f}", flush=True)
    if world > 1:
        time.sleep(0.3)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
