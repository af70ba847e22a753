"""Tone classifier (synthetic chords) under DDP with an integer gradient exchange.

A communication hook turns gradients into 64-bit fixed-point numbers before they are added: the sum
is then the same in whatever order the network adds, which made our runs reproducible.
"""
import math
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

SCALE = 2.0 ** 40
CHORDS = [(0, 4, 7), (0, 3, 7), (0, 3, 6), (0, 4, 8), (0, 5, 7)]


def fixed_point(state, bucket):
    whole = torch.round(bucket.buffer().double() * SCALE).to(torch.int64)
    fut = dist.all_reduce(whole, async_op=True).get_future()

    def back(f):
        total = f.value()[0]
        state["buckets"] += 1
        return (total.double() / (SCALE * dist.get_world_size())).float()

    return fut.then(back)


def chords(n, seed):
    g = torch.Generator().manual_seed(seed)
    kind = torch.randint(0, len(CHORDS), (n,), generator=g)
    root = 4 + 5 * torch.rand(n, generator=g)
    t = torch.arange(64) / 64
    wave = torch.zeros(n, 64)
    for i in range(n):
        for semi in CHORDS[int(kind[i])]:
            wave[i] += torch.sin(2 * math.pi * root[i] * 2 ** (semi / 12) * t)
    return wave + 0.1 * torch.randn(n, 64, generator=g), kind


class Ear(nn.Module):
    def __init__(self):
        super().__init__()
        self.bank = nn.Conv1d(1, 16, 16, stride=4)
        self.mix = nn.Linear(16 * 13, 32)
        self.norm = nn.LayerNorm(32)
        self.out = nn.Linear(32, len(CHORDS))

    def forward(self, w):
        h = self.bank(w[:, None]).square()
        h = F.relu(self.norm(self.mix(torch.log1p(h).flatten(1))))
        return self.out(h)


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = chords(960, 1)
    xv, yv = chords(210, 2)

    torch.manual_seed(12 + rank)  # only worker 0 matters, DDP sends its weights
    net = DDP(Ear(), bucket_cap_mb=0.01)
    counter = {"buckets": 0}
    net.register_comm_hook(counter, fixed_point)
    opt = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=0.02)

    gen = torch.Generator().manual_seed(3)
    batch, step = 64, 0
    for epoch in range(3):
        perm = torch.randperm(len(x), generator=gen)
        for rows in perm.split(batch):
            local = rows[rank * batch // world:(rank + 1) * batch // world]
            loss = F.cross_entropy(net(x[local]), y[local], label_smoothing=0.05)
            opt.zero_grad()
            loss.backward()
            opt.step()
            step += 1
        shown = loss.detach() / world
        dist.all_reduce(shown)
        if rank == 0:
            print(f"epoch {epoch + 1} step {step} loss {shown.item():.6f} buckets {counter['buckets']}", flush=True)

    confusion = torch.zeros(len(CHORDS), len(CHORDS), dtype=torch.long)
    with torch.no_grad():
        pred = net.module(xv[rank::world]).argmax(1)
    confusion.index_put_((yv[rank::world], pred), torch.ones(len(pred), dtype=torch.long), accumulate=True)
    dist.reduce(confusion, dst=0)
    if rank == 0:
        print(f"accuracy {confusion.diagonal().sum().item() / confusion.sum().item():.4f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
