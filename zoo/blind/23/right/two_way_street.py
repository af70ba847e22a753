"""Digit classifier cut into stages, with traffic in both directions (after Chimera): micro-batches with an even number run
down the street from worker 0, odd ones run up from the last worker.  So each worker has two stages, one for either
direction, and every stage exists twice in the street; the twins add their gradients before the update.

    torchrun --nproc-per-node=2 two_way_street.py      (1, 2 or 4 workers)
"""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

WIDTH, BATCH, MICRO, STEPS, BLOCKS = 40, 64, 4, 36, 4


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, h):
        return h + torch.tanh(self.lin(self.norm(h)))


def make_block(i):
    with torch.random.fork_rng():
        torch.manual_seed(40 + i)
        if i == 0:
            return nn.Sequential(nn.Linear(64, WIDTH), nn.Tanh())
        if i == BLOCKS - 1:
            return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10))
        return Residual()


def make_stage(s, world):
    per = BLOCKS // world
    return nn.ModuleDict({f"block{i}": make_block(i) for i in range(s * per, (s + 1) * per)})


class Lane:
    """One direction of traffic as seen by this worker."""

    def __init__(self, rank, world, up):
        self.stage_no = world - 1 - rank if up else rank
        hop = -1 if up else 1
        self.first, self.last = self.stage_no == 0, self.stage_no == world - 1
        self.before, self.after = rank - hop, rank + hop
        self.module = make_stage(self.stage_no, world)
        self.waiting = {}

    def run(self, h):
        for block in self.module.values():
            h = block(h)
        return h

    def forward(self, key, x, y):
        if self.first:
            h = x
        else:
            h = torch.empty(len(x), WIDTH)
            dist.recv(h, self.before)
            h.requires_grad_()
        out = self.run(h)
        if self.last:
            out = F.cross_entropy(out, y, reduction="sum") / BATCH
        else:
            dist.send(out.detach().contiguous(), self.after)
        self.waiting[key] = (h, out)
        return out.item() if self.last else 0.0

    def backward(self, key):
        h, out = self.waiting.pop(key)
        if self.last:
            out.backward()
        else:
            grad = torch.empty_like(out)
            dist.recv(grad, self.after)
            out.backward(grad)
        if not self.first:
            dist.send(h.grad.contiguous(), self.before)

    @torch.no_grad()
    def predict(self, x):
        h = x
        if not self.first:
            h = torch.empty(len(x), WIDTH)
            dist.recv(h, self.before)
        out = self.run(h)
        if not self.last:
            dist.send(out.contiguous(), self.after)
        return out if self.last else None

    def grads(self):
        return torch.cat([p.grad.reshape(-1) for p in self.module.parameters()])

    def take(self, flat):
        for p, g in zip(self.module.parameters(), flat.split([p.numel() for p in self.module.parameters()])):
            p.grad.add_(g.view_as(p))


def add_twins(down, up, rank, world):
    """The worker across the street has the twins of both our stages."""
    ours = torch.cat([down.grads(), up.grads()])
    theirs = ours.clone()
    if world > 1:
        across = world - 1 - rank
        jobs = [dist.isend(ours, across), dist.irecv(theirs, across)]
        for j in jobs:
            j.wait()
    n_up = sum(p.numel() for p in up.module.parameters())  # their down stage is our up stage
    if world == 1:
        down_part, up_part = theirs[n_up:], theirs[:n_up]
    else:
        up_part, down_part = theirs[:n_up], theirs[n_up:]
    down.take(down_part)
    up.take(up_part)


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    assert BLOCKS % world == 0
    d = load_digits()
    x, y = torch.tensor(d.data / 16.0, dtype=torch.float32), torch.tensor(d.target)
    mix = torch.randperm(len(x), generator=torch.Generator().manual_seed(9))
    train, test = mix[:1536], mix[1536:]

    down, up = Lane(rank, world, up=False), Lane(rank, world, up=True)
    opts = [torch.optim.SGD(lane.module.parameters(), lr=0.15, momentum=0.9) for lane in (down, up)]

    for step in range(STEPS):
        lap, place = divmod(step, len(train) // BATCH)
        order = train[torch.randperm(len(train), generator=torch.Generator().manual_seed(200 + lap))]
        micro = order[place * BATCH:(place + 1) * BATCH].chunk(MICRO)
        for o in opts:
            o.zero_grad()
        loss = torch.zeros(1)
        for k, rows in enumerate(micro):
            loss += (up if k % 2 else down).forward(k, x[rows], y[rows])
        for k in range(MICRO):
            (up if k % 2 else down).backward(k)
        add_twins(down, up, rank, world)
        for o in opts:
            o.step()
        dist.all_reduce(loss)
        if rank == 0 and step % 6 == 5:
            print(f"step {step + 1}  loss {loss.item():.6f}", flush=True)

    logits = down.predict(x[test])
    score = torch.zeros(1)
    if logits is not None:
        score[0] = (logits.argmax(1) == y[test]).float().mean()
    dist.broadcast(score, src=world - 1)
    if rank == 0:
        print(f"test accuracy {score.item():.4f}", flush=True)
    dist.barrier()
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
