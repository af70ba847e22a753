"""Residual network for digits cut into stages, one per worker, as a conveyor of micro-batches.

The cut is by cost, not by number of blocks: the first stage also has the input projection and the last
one the head.  A stage builds, owns and updates its layers only; the norm for clipping is of all stages.
"""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

WIDTH, BLOCKS, MICRO, BATCH, STEPS = 40, 6, 4, 48, 30


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def plan(world):
    """Block numbers of every stage."""
    cuts = {1: [6], 2: [2, 4], 4: [1, 2, 2, 1]}.get(world)
    if cuts is None:
        cuts = [BLOCKS // world + (s < BLOCKS % world) for s in range(world)]
    edges = [sum(cuts[:s]) for s in range(world + 1)]
    return [range(edges[s], edges[s + 1]) for s in range(world)]


class Stage(nn.Module):
    def __init__(self, blocks, first, last):
        super().__init__()
        layers = {}
        if first:
            layers["inp"] = self.seeded(500, lambda: nn.Linear(64, WIDTH))
        for b in blocks:
            layers[f"block{b}"] = self.seeded(b, Block)
        if last:
            layers["head"] = self.seeded(501, lambda: nn.Linear(WIDTH, 10))
        self.layers = nn.ModuleDict(layers)

    @staticmethod
    def seeded(number, make):
        torch.manual_seed(4000 + number)
        return make()

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x)
        return x


class Conveyor:
    def __init__(self):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.first, self.last = self.rank == 0, self.rank == self.world - 1
        self.stage = Stage(plan(self.world)[self.rank], self.first, self.last)

    def train_step(self, x, y):
        inputs, outputs, total = [], [], torch.zeros(())
        size = len(x) // MICRO
        for m in range(MICRO):
            if self.first:
                h = x[m * size:(m + 1) * size]
            else:
                h = torch.empty(size, WIDTH)
                dist.recv(h, src=self.rank - 1)
                h.requires_grad_()
            out = self.stage(h)
            if self.last:
                out = F.cross_entropy(out, y[m * size:(m + 1) * size]) / MICRO
                total += out.detach()
            else:
                dist.send(out.detach(), dst=self.rank + 1)
            inputs.append(h)
            outputs.append(out)
        for m in reversed(range(MICRO)):
            if self.last:
                outputs[m].backward()
            else:
                g = torch.empty_like(outputs[m])
                dist.recv(g, src=self.rank + 1)
                outputs[m].backward(g)
            if not self.first:
                dist.send(inputs[m].grad, dst=self.rank - 1)
        return total

    def clip(self, limit):
        sq = sum(p.grad.square().sum() for p in self.stage.parameters())
        dist.all_reduce(sq)
        scale = min(1.0, limit / (sq.sqrt().item() + 1e-6))
        for p in self.stage.parameters():
            p.grad.mul_(scale)
        return sq.sqrt().item()

    @torch.no_grad()
    def predict(self, x):
        h = x
        if not self.first:
            h = torch.empty(len(x), WIDTH)
            dist.recv(h, src=self.rank - 1)
        h = self.stage(h)
        if not self.last:
            dist.send(h, dst=self.rank + 1)
        return h


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    belt = Conveyor()
    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    opt = torch.optim.AdamW(belt.stage.parameters(), lr=3e-3, weight_decay=0.01)
    gen = torch.Generator().manual_seed(77)

    for step in range(STEPS):
        ids = torch.randperm(1500, generator=gen)[:BATCH]
        opt.zero_grad()
        loss = belt.train_step(x[ids], y[ids])
        norm = belt.clip(1.0)
        opt.step()
        if step % 10 == 9:
            dist.broadcast(loss, src=belt.world - 1)
            if belt.first:
                print(f"step {step + 1} loss {loss.item():.6f} norm {norm:.5f}", flush=True)

    result = torch.zeros(1)
    logits = belt.predict(x[1500:])
    if belt.last:
        result[0] = F.cross_entropy(logits, y[1500:]).item()
    dist.broadcast(result, src=belt.world - 1)
    if belt.first:
        print(f"held-out loss {result.item():.6f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
