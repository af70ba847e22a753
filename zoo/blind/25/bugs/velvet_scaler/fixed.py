"""Flat sharded training with dynamic loss scaling.

Gradients have to stay inside the range of float16, the format in which the target device stores them. Parameters
live in one flat float32 vector; each process updates its shard of it and gathers the rest.
"""
import argparse
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_diabetes


class LossScale:
    def __init__(self, start=2.0 ** 17, growth_every=5):
        self.value, self.growth_every, self.clean = start, growth_every, 0

    def update(self, overflow):
        if overflow:
            self.value /= 2
            self.clean = 0
        else:
            self.clean += 1
            if self.clean == self.growth_every:
                self.value *= 2
                self.clean = 0


class FlatShards:
    def __init__(self, model, rank, world, lr):
        self.params = list(model.parameters())
        self.size = sum(p.numel() for p in self.params)
        self.world = world
        self.length = -(-self.size // world)
        self.rank = rank
        flat = torch.cat([p.data.reshape(-1) for p in self.params])
        self.flat = F.pad(flat, (0, self.length * world - self.size))
        self.master = self.own(self.flat).clone().requires_grad_()
        self.opt = torch.optim.SGD([self.master], lr=lr, momentum=0.9)
        self.spread()

    def own(self, flat):
        return flat[self.rank * self.length:(self.rank + 1) * self.length]

    def spread(self):
        at = 0
        for p in self.params:
            p.data = self.flat[at:at + p.numel()].view_as(p)
            at += p.numel()

    def reduced_shard(self, scale):
        flat = torch.cat([p.grad.reshape(-1) for p in self.params]) / scale
        flat = F.pad(flat, (0, self.length * self.world - self.size))
        dist.all_reduce(flat)
        for p in self.params:
            p.grad = None
        return self.own(flat) / self.world

    def step(self, scale):
        """One update; returns whether it was skipped."""
        grad = self.reduced_shard(scale)
        overflow = (~torch.isfinite((grad * scale).half())).any().float()
        dist.all_reduce(overflow, op=dist.ReduceOp.MAX)
        if overflow.item() == 0:
            self.master.grad = grad
            self.opt.step()
        parts = [torch.empty(self.length) for _ in range(self.world)]
        dist.all_gather(parts, self.master.detach())
        self.flat.copy_(torch.cat(parts))
        return overflow.item() > 0


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--steps", type=int, default=48)
    ap.add_argument("--lr", type=float, default=0.02)
    args = ap.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = load_diabetes(return_X_y=True)
    x, y = torch.tensor(x * 20, dtype=torch.float32), torch.tensor((y - y.mean()) / y.std(), dtype=torch.float32)
    torch.manual_seed(55)
    net = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 1))
    shards = FlatShards(net, rank, world, args.lr)
    scale = LossScale()
    draw = torch.Generator().manual_seed(56)
    skipped = 0
    for step in range(1, args.steps + 1):
        idx = torch.randperm(360, generator=draw)[:args.batch].chunk(world)[rank]
        loss = F.mse_loss(net(x[idx]).squeeze(1), y[idx])
        (loss * scale.value).backward()
        overflow = shards.step(scale.value)
        scale.update(overflow)
        skipped += overflow
        if step % 12 == 0:
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step} mse {shown.item() / world:.5f} scale {scale.value:g} skipped {skipped}", flush=True)
    with torch.no_grad():
        final = F.mse_loss(net(x[360:]).squeeze(1), y[360:]).item()
    if rank == 0:
        print(f"validation mse {final:.6f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
