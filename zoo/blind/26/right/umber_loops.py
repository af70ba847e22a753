"""Residual MLP on the digits, its blocks dealt over the processes in turn (block i on process i mod world).

Each micro-batch visits the processes several times. The stem's output also goes straight to the head.
"""
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

BLOCKS, WIDTH, BATCH, MICRO = 8, 40, 64, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + 0.5 * self.down(F.gelu(self.up(self.norm(x))))


class Chain:
    """Stations 0 (stem), 1..BLOCKS, BLOCKS+1 (head); a station knows its owner and keeps inputs for the way back."""

    def __init__(self, rank, world):
        self.rank, self.world = rank, world
        torch.manual_seed(404)
        stations = [nn.Linear(64, WIDTH)] + [Block() for _ in range(BLOCKS)] + [nn.Linear(2 * WIDTH, 10)]
        self.owner = [0] + [i % world for i in range(BLOCKS)] + [(BLOCKS - 1) % world]
        self.own = {i: s for i, s in enumerate(stations) if self.owner[i] == rank}

    def parameters(self):
        return [p for s in self.own.values() for p in s.parameters()]

    def move(self, t, a, b, rows):
        """t from process a to process b; None elsewhere."""
        if a == b:
            return t
        if self.rank == a:
            dist.send(t.contiguous(), b)
        elif self.rank == b:
            t = torch.empty(rows, WIDTH)
            dist.recv(t, a)
            return t
        return None

    def micro(self, x, y, scale):
        n, last = len(x), BLOCKS + 1
        kept, h, stem = {}, None, None
        for i in range(last):
            if i:
                h = self.move(h, self.owner[i - 1], self.owner[i], n)
            if i in self.own:
                inp = x if i == 0 else h.detach().requires_grad_()
                out = self.own[i](inp)
                kept[i] = (inp, out)
                h = out.detach()
                if i == 0:
                    stem = h
        h = self.move(h, self.owner[last - 1], self.owner[last], n)
        stem = self.move(stem, 0, self.owner[last], n)
        loss, gh, gs = torch.zeros(()), None, None
        if last in self.own:
            h, stem = h.detach().requires_grad_(), stem.detach().requires_grad_()
            loss = F.cross_entropy(self.own[last](torch.cat([h, stem], 1)), y, reduction="sum") * scale
            loss.backward()
            gh, gs = h.grad, stem.grad
        gs = self.move(gs, self.owner[last], 0, n)
        for i in range(last - 1, -1, -1):
            gh = self.move(gh, self.owner[i + 1], self.owner[i], n)
            if i in self.own:
                inp, out = kept.pop(i)
                out.backward(gh + gs if i == 0 else gh)
                gh = inp.grad
        return loss.detach()


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    rank = int(os.environ.get("RANK", 0))
    world = int(os.environ.get("WORLD_SIZE", 1))
    bunch = load_digits()
    x = torch.tensor(bunch.data / 16.0 - 0.3, dtype=torch.float32)
    y = torch.tensor(bunch.target)
    chain = Chain(rank, world)
    mine = chain.parameters()
    opt = torch.optim.Adam(mine, lr=2e-3, eps=1e-6)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, 4e-3, total_steps=30)
    for step in range(30):
        rows = torch.randint(1600, (BATCH,), generator=torch.Generator().manual_seed(step))
        opt.zero_grad()
        loss = sum(chain.micro(x[r], y[r], 1 / BATCH) for r in rows.chunk(MICRO))
        square = sum(p.grad.square().sum() for p in mine)
        both = torch.stack([square, loss])
        if world > 1:
            dist.all_reduce(both)  # every parameter has one owner, so the squares add up to the norm of the whole
        norm = both[0].sqrt()
        for p in mine:
            p.grad *= torch.clamp(1.0 / (norm + 1e-6), max=1.0)
        opt.step()
        sched.step()
        if rank == 0 and step % 6 == 5:
            print(f"step {step + 1} loss {both[1].item():.5f} gradient norm {norm.item():.5f}", flush=True)
    print(f"process {rank} held {sum(p.numel() for p in mine)} parameters in {len(chain.own)} stations", file=sys.stderr)
    if world > 1:
        time.sleep(0.3)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
