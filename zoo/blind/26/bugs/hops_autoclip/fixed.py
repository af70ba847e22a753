"""Bitterness of beer from brew sheets: robust regression with AutoClip.

AutoClip (Seetharaman et al., 2020) clips each step's gradient to a percentile
of all gradient norms seen so far.  Gradients are averaged by hand.
"""
import os
import time
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch import nn


@dataclass
class Config:
    steps: int = 48
    batch: int = 40
    lr: float = 0.03
    percentile: float = 30.0
    seed: int = 12


@dataclass
class AutoClip:
    percentile: float
    history: list = field(default_factory=list)

    @staticmethod
    def norm(params):
        return float(torch.stack([p.grad.norm() for p in params]).norm())

    def observe(self, params):
        self.history.append(self.norm(params))

    def apply(self, params):
        limit = float(np.percentile(self.history, self.percentile))
        torch.nn.utils.clip_grad_norm_(params, limit)
        return limit


class Brewery:
    def __init__(self, seed):
        rng = np.random.default_rng(seed)
        n = 1200
        x = rng.normal(size=(n, 12)).astype(np.float32)
        ibu = np.tanh(x[:, 0] * x[:, 1]) + 0.6 * x[:, 2] - 0.4 * np.abs(x[:, 3]) + 0.1 * rng.normal(size=n)
        wild = rng.random(n) < 0.05
        ibu[wild] += rng.normal(scale=9.0, size=wild.sum())
        self.x, self.y = torch.from_numpy(x), torch.from_numpy(ibu.astype(np.float32))
        self.rng = np.random.default_rng(seed + 1)

    def batch(self, size):
        return torch.from_numpy(self.rng.choice(1000, size, replace=False))


def average_gradients(params, world):
    if world == 1:
        return
    flat = torch.cat([p.grad.reshape(-1) for p in params])
    dist.all_reduce(flat)
    flat /= world
    at = 0
    for p in params:
        p.grad.copy_(flat[at:at + p.numel()].view_as(p))
        at += p.numel()


def run(cfg, rank, world):
    torch.manual_seed(cfg.seed)
    net = nn.Sequential(nn.Linear(12, 32), nn.SiLU(), nn.Linear(32, 16), nn.SiLU(), nn.Linear(16, 1))
    params = list(net.parameters())
    opt = torch.optim.SGD(params, lr=cfg.lr, momentum=0.9)
    brewery, clipper = Brewery(cfg.seed), AutoClip(cfg.percentile)

    for step in range(cfg.steps):
        rows = brewery.batch(cfg.batch)[rank::world]
        loss = (net(brewery.x[rows]).squeeze(1) - brewery.y[rows]).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        average_gradients(params, world)
        clipper.observe(params)
        limit = clipper.apply(params)
        opt.step()
        if rank == 0 and step % 8 == 7:
            print(f"step {step + 1}: clipped to {limit:.5f}")

    with torch.no_grad():
        err = (net(brewery.x[1000:]).squeeze(1) - brewery.y[1000:]).abs().median().item()
    if rank == 0:
        print(f"median absolute error on held-out brews: {err:.5f}")


def main():
    world = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    if world > 1:
        dist.init_process_group("gloo")
    run(Config(), rank, world)
    if world > 1:
        time.sleep(0.3)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
