"""Gait recognition with linear recurrences; the time axis of every recording is divided among the workers.

A worker scans its stretch from a zero state, then corrects it by what the stretches before it left behind.
"""
import argparse
import os
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class Collect(torch.autograd.Function):
    """Everybody's tensor, stacked; what others derive for ours comes back in the backward pass."""

    @staticmethod
    def forward(ctx, t):
        if WORLD == 1:
            return t[None].clone()
        parts = [torch.empty_like(t) for _ in range(WORLD)]
        dist.all_gather(parts, t.contiguous())
        return torch.stack(parts)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        if WORLD > 1:
            dist.all_reduce(g)
        return g[RANK]


class SumUp(torch.autograd.Function):
    """Sum over workers of partial pools; the loss behind it is computed by everyone alike."""

    @staticmethod
    def forward(ctx, t):
        t = t.clone()
        if WORLD > 1:
            dist.all_reduce(t)
        return t

    @staticmethod
    def backward(ctx, g):
        return g


class Recurrence(nn.Module):
    def __init__(self, n_in, n_state):
        super().__init__()
        self.decay = nn.Parameter(torch.linspace(-1.0, 2.5, n_state))
        self.inp = nn.Linear(n_in, n_state)
        self.gate = nn.Linear(n_in, n_state)

    def forward(self, x):
        a = torch.sigmoid(self.decay)
        u = self.inp(x) * (1 - a)
        h, states = torch.zeros_like(u[:, 0]), []
        for t in range(u.shape[1]):
            h = a * h + u[:, t]
            states.append(h)
        length = u.shape[1]
        ends = Collect.apply(h)
        carry = torch.zeros_like(h)
        for s in range(WORLD):
            reach = a ** (length * max(RANK - 1 - s, 0)) * float(s < RANK)
            carry = carry + reach * ends[s]
        power = a ** torch.arange(1, length + 1, dtype=u.dtype)[:, None]
        full = torch.stack(states, 1) + carry[:, None] * power
        return full * torch.sigmoid(self.gate(x))


class Walker(nn.Module):
    def __init__(self, n_in=3, n_state=16, classes=4):
        super().__init__()
        self.body = nn.Sequential(Recurrence(n_in, n_state), nn.Linear(n_state, n_state), nn.SiLU(),
                                  Recurrence(n_state, n_state))
        self.head = nn.Linear(n_state, classes)

    def forward(self, x, total):
        h = self.body(x)
        return self.head(SumUp.apply((h ** 2).sum(1)) * 8 / total)


def recordings(n, length, seed):
    g = np.random.default_rng(seed)
    kind = g.integers(0, 4, n)
    t = np.arange(length)[None, :]
    beat = np.array([0.2, 0.3, 0.45, 0.65])[kind][:, None] * g.normal(1, .05, (n, 1))
    phase = g.uniform(0, 6.28, (n, 1))
    axes = [np.sin(beat * t + phase), np.cos(2 * beat * t + phase) * 0.6, np.sin(beat * t) ** 2]
    x = np.stack(axes, -1) + g.normal(0, .35, (n, length, 3))
    return torch.tensor(x, dtype=torch.float32), torch.tensor(kind)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--length", type=int, default=48)
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--batch", type=int, default=32)
    args = ap.parse_args()
    if WORLD > 1:
        dist.init_process_group("gloo")
    x, y = recordings(384, args.length, seed=1)
    x = x.chunk(WORLD, dim=1)[RANK]
    train, test = slice(0, 320), slice(320, None)

    torch.manual_seed(6)
    model = Walker()
    opt = torch.optim.AdamW(model.parameters(), lr=3e-2, eps=1e-6)
    for step in range(args.steps):
        g = torch.Generator().manual_seed(step)
        rows = torch.randint(0, 320, (args.batch,), generator=g)
        loss = F.cross_entropy(model(x[rows], args.length), y[rows])
        opt.zero_grad()
        loss.backward()
        if WORLD > 1:
            for p in model.body.parameters():  # the head has seen the whole recording already
                dist.all_reduce(p.grad)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        if RANK == 0 and step % 8 == 7:
            print(f"step {step + 1}: loss {loss.item():.6f} norm {norm.item():.5f}", flush=True)

    with torch.no_grad():
        hit = (model(x[test], args.length).argmax(1) == y[test]).float().mean().item()
    if RANK == 0:
        print(f"accuracy {hit:.4f}", flush=True)
    if WORLD > 1:
        time.sleep(0.3)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
