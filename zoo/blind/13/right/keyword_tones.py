"""Keyword spotting on synthetic tones: a small 1-d conv net, large batches by gradient accumulation.

The reducer is kept quiet during the whole window and the accumulated gradients are sent in one flat
message at its end: fewer and larger messages over our slow network.

    torchrun --nproc-per-node 4 keyword_tones.py
"""
import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn.parallel import DistributedDataParallel as DDP

WORDS = 6
LENGTH = 256
BATCH = 96
MICRO = 8
STEPS = 24


def make_clips(n, seed):
    """Each word is a pair of tones that follow one another, at a random pitch and loudness."""
    g = torch.Generator().manual_seed(seed)
    word = torch.randint(WORDS, (n,), generator=g)
    t = torch.arange(LENGTH) / LENGTH
    base = 6 + 2 * torch.rand(n, 1, generator=g)
    first = base * (1 + word[:, None] % 3)
    second = base * (1 + word[:, None] // 2)
    envelope = torch.sigmoid((t - 0.5) * 40)
    clip = torch.sin(2 * math.pi * first * t) * (1 - envelope) + torch.sin(2 * math.pi * second * t) * envelope
    loud = 0.5 + torch.rand(n, 1, generator=g)
    return (clip * loud + 0.3 * torch.randn(n, LENGTH, generator=g))[:, None], word


class Spotter(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(1, width, 9, stride=4, padding=4), nn.GroupNorm(4, width), nn.GELU(),
            nn.Conv1d(width, 2 * width, 5, stride=2, padding=2), nn.GroupNorm(4, 2 * width), nn.GELU(),
            nn.AdaptiveAvgPool1d(8), nn.Flatten())
        self.out = nn.Linear(16 * width, WORDS)

    def forward(self, x):
        return self.out(self.layers(x))


def exchange(params, world):
    grads = [p.grad for p in params if p.grad is not None]
    flat = _flatten_dense_tensors(grads)
    dist.all_reduce(flat)
    flat /= world
    for g, new in zip(grads, _unflatten_dense_tensors(flat, grads)):
        g.copy_(new)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1234 + rank)
    net = DDP(Spotter())
    opt = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=0.02)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, 6e-3, total_steps=STEPS)
    x, y = make_clips(960, seed=5)
    vx, vy = make_clips(301, seed=6)

    order = torch.Generator().manual_seed(99)
    parts = BATCH // (MICRO * world)
    for step in range(STEPS):
        rows = torch.randperm(len(x), generator=order)[:BATCH].view(-1, MICRO)[rank::world]
        opt.zero_grad()
        logged = torch.zeros(())
        with net.no_sync():
            for micro in rows:
                loss = F.cross_entropy(net(x[micro]), y[micro]) / parts
                loss.backward()
                logged += loss.detach()
        exchange(list(net.parameters()), world)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        sched.step()
        if step % 6 == 5:
            dist.all_reduce(logged)
            if rank == 0:
                print(f"step {step + 1} loss {logged.item() / world:.4f}")

    net.eval()
    with torch.no_grad():
        hits = (net.module(vx[rank::world]).argmax(1) == vy[rank::world]).sum()
    dist.all_reduce(hits)
    if rank == 0:
        print(f"accuracy {hits.item() / len(vx):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
