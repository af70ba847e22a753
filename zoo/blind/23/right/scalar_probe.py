"""Gradient-free tuning of a wine classifier.

Every step looks a little to both sides along a few random directions (central differences) and moves along the slopes.
Only two numbers a direction have to be added up over the processes, so this also works over a very thin line.
"""
import argparse
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_wine


class DirectionalSearch(torch.optim.Optimizer):
    """SPSA-like; the directions are drawn again from their seed instead of being kept."""

    def __init__(self, params, lr=0.05, reach=1e-3, directions=6, momentum=0.8, seed=0):
        super().__init__(params, dict(lr=lr, reach=reach, directions=directions, momentum=momentum))
        self.seed, self.turn = seed, 0

    def _walk(self, seed, length):
        g = torch.Generator().manual_seed(seed)
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.randn(p.shape, generator=g, dtype=p.dtype), alpha=length)

    @torch.no_grad()
    def step(self, closure):
        """closure() gives the mean loss of the global batch at the present weights."""
        group = self.param_groups[0]
        reach, k = group["reach"], group["directions"]
        seeds = [self.seed + 1000 * self.turn + i for i in range(k)]
        slopes, height = [], 0.0
        kept = [p.clone() for p in group["params"]]
        for s in seeds:
            self._walk(s, reach)
            above = closure()
            self._walk(s, -2 * reach)
            below = closure()
            for p, q in zip(group["params"], kept):
                p.copy_(q)
            slopes.append((above - below) / (2 * reach))
            height += (above + below) / (2 * k)
        moves = [torch.zeros_like(p) for p in group["params"]]
        for s, slope in zip(seeds, slopes):
            g = torch.Generator().manual_seed(s)
            for m in moves:
                m.add_(torch.randn(m.shape, generator=g, dtype=m.dtype), alpha=slope / k)
        for p, m in zip(group["params"], moves):
            buf = self.state[p].setdefault("pace", torch.zeros_like(p))
            buf.mul_(group["momentum"]).add_(m)
            p.add_(buf, alpha=-group["lr"])
        self.turn += 1
        return height


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=60)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--lr", type=float, default=0.03)
    opts = ap.parse_args()

    distributed = "RANK" in os.environ
    if distributed:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if distributed else 0
    world = dist.get_world_size() if distributed else 1

    x, y = load_wine(return_X_y=True)
    x, y = torch.tensor((x - x.mean(0)) / x.std(0)), torch.tensor(y)
    everyone = torch.randperm(len(x), generator=torch.Generator().manual_seed(4))
    train, test = everyone[:128], everyone[128:]

    torch.manual_seed(31)
    net = nn.Sequential(nn.Linear(13, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    for p in net.parameters():
        p.requires_grad_(False)
    search = DirectionalSearch(net.parameters(), lr=opts.lr, seed=777)

    for step in range(opts.steps):
        lap, place = divmod(step, len(train) // opts.batch)
        order = train[torch.randperm(len(train), generator=torch.Generator().manual_seed(50 + lap))]
        rows = order[place * opts.batch:(place + 1) * opts.batch][rank::world]

        def height():
            total = F.cross_entropy(net(x[rows]), y[rows], reduction="sum").reshape(1)
            if distributed:
                dist.all_reduce(total)
            return total.item() / opts.batch

        level = search.step(height)
        if step == opts.steps // 2:
            search.param_groups[0]["lr"] *= 0.5
        if rank == 0 and step % 10 == 9:
            print(f"step {step + 1:3d}  level {level:.6f}", flush=True)

    right = (net(x[test]).argmax(1) == y[test]).float().mean().item()
    if rank == 0:
        size = sum(p.pow(2).sum() for p in net.parameters()).sqrt().item()
        print(f"test accuracy {right:.4f}  weight size {size:.6f}", flush=True)
    if distributed:
        time.sleep(0.3)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
