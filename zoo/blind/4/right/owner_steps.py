"""Tumour classifier; every process keeps Adam's moments for its own share of the weights."""
import argparse
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_breast_cancer
from torch import nn


class SharedAdam:
    def __init__(self, params, **kw):
        self.params = list(params)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        load = [0] * self.world
        self.owner = {}
        for p in sorted(self.params, key=lambda p: -p.numel()):
            r = load.index(min(load))
            self.owner[p] = r
            load[r] += p.numel()
        self.mine = [p for p in self.params if self.owner[p] == self.rank]
        self.adam = torch.optim.AdamW(self.mine, **kw)

    def step(self, limit):
        for p in self.params:
            dist.reduce(p.grad, dst=self.owner[p])
        square = torch.zeros(1)
        for p in self.mine:
            p.grad.div_(self.world)
            square += p.grad.pow(2).sum()
        dist.all_reduce(square)
        norm = square.sqrt().item()
        if norm > limit:
            for p in self.mine:
                p.grad.mul_(limit / norm)
        self.adam.step()
        for p in self.params:
            dist.broadcast(p.data, src=self.owner[p])
        return norm

    def zero_grad(self):
        for p in self.params:
            p.grad = None


def f1(net, x, y, rank, world):
    with torch.no_grad():
        guess = net(x[rank::world]).squeeze(1) > 0
    truth = y[rank::world] > 0.5
    counts = torch.stack([(guess & truth).sum(), (guess & ~truth).sum(), (~guess & truth).sum()])
    dist.all_reduce(counts)
    tp, fp, fn = counts.tolist()
    return 2 * tp / (2 * tp + fp + fn)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=48)
    ap.add_argument("--batch", type=int, default=40)
    ap.add_argument("--lr", type=float, default=4e-3)
    ap.add_argument("--limit", type=float, default=0.5)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    table = load_breast_cancer()
    x = torch.tensor(table.data, dtype=torch.float32)
    y = torch.tensor(table.target, dtype=torch.float32)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    train, test = slice(0, 440), slice(440, None)
    x = (x - x[train].mean(0)) / x[train].std(0)

    torch.manual_seed(99)
    net = nn.Sequential(nn.Linear(30, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 1))
    opt = SharedAdam(net.parameters(), lr=args.lr, weight_decay=0.05)
    gen = torch.Generator().manual_seed(1)
    queue = torch.empty(0, dtype=torch.long)
    for step in range(args.steps):
        if len(queue) < args.batch:
            queue = torch.randperm(440, generator=gen)
        ids, queue = queue[:args.batch], queue[args.batch:]
        ids = ids.view(world, -1)[rank]
        opt.zero_grad()
        loss = F.binary_cross_entropy_with_logits(net(x[ids]).squeeze(1), y[ids])
        loss.backward()
        norm = opt.step(args.limit)
        if step % 12 == 11:
            score = f1(net, x[test], y[test], rank, world)
            if rank == 0:
                print(f"{step + 1} norm {norm:.6f} F1 {score:.5f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
