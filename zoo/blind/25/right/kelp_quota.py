"""Convnet on digits where machines have different quotas of micro-batches.

A step always has twelve micro-batches of eight images.  Machine 0 is the fast one: it computes as many
as its quota says, the others share the rest.
"""
import contextlib
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel

MICRO, PER_STEP, STEPS = 8, 12, 24


def quotas(world):
    if world == 1:
        return [PER_STEP]
    first = PER_STEP * 2 // (world + 1)
    rest = PER_STEP - first
    q = [first] + [rest // (world - 1)] * (world - 1)
    for k in range(rest % (world - 1)):
        q[1 + k] += 1
    return q


class SmallNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1 = nn.Conv2d(1, 8, 3, padding=1)
        self.c2 = nn.Conv2d(8, 16, 3, padding=1, stride=2)
        self.norm = nn.GroupNorm(4, 16)
        self.head = nn.Linear(16 * 16, 10)

    def forward(self, x):
        x = F.relu(self.c1(x))
        x = F.relu(self.norm(self.c2(x)))
        return self.head(x.flatten(1))


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    q = quotas(world)
    lo = sum(q[:rank])
    if rank == 0:
        print("quotas", q, flush=True)

    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    y = torch.tensor(digits.target)
    weight = torch.full((10,), 1.0)
    weight[8] = 2.0  # eights are the ones customers complain about

    torch.manual_seed(70)
    net = DistributedDataParallel(SmallNet())
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    g = torch.Generator().manual_seed(71)

    for step in range(STEPS):
        ids = torch.randperm(1600, generator=g)[:MICRO * PER_STEP]
        norm = weight[y[ids]].sum()
        mine = ids.split(MICRO)[lo:lo + q[rank]]
        opt.zero_grad()
        seen = torch.zeros(())
        for k, rows in enumerate(mine):
            quiet = net.no_sync() if k + 1 < len(mine) else contextlib.nullcontext()
            with quiet:
                loss = F.cross_entropy(net(x[rows]), y[rows], weight=weight, reduction="sum") * world / norm
                loss.backward()
            seen += loss.detach() / world
        opt.step()
        if step % 6 == 5:
            dist.all_reduce(seen)
            if rank == 0:
                print(f"step {step + 1} loss {seen.item():.6f}", flush=True)

    net.eval()
    good = torch.zeros(1, dtype=torch.long)
    with torch.no_grad():
        for chunk in torch.arange(1600, len(x)).split(32)[rank::world]:
            good += (net.module(x[chunk]).argmax(1) == y[chunk]).sum()
    dist.all_reduce(good)
    if rank == 0:
        print(f"accuracy {good.item() / (len(x) - 1600):.4f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
