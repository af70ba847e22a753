"""Denoising diffusion on a spiral; noise levels are drawn more often where the loss is large."""
import argparse
import math

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

LEVELS = 16


class LevelSampler:
    """Importance sampling of the noise level by the running second moment of its loss."""

    def __init__(self, keep=0.7, uniform=0.1):
        self.keep, self.uniform = keep, uniform
        self.second = torch.ones(LEVELS)

    def probabilities(self):
        w = self.second.sqrt()
        return (1 - self.uniform) * w / w.sum() + self.uniform / LEVELS

    def sample(self, u):
        p = self.probabilities()
        level = torch.searchsorted(p.cumsum(0), u).clamp(max=LEVELS - 1)
        return level, 1 / (LEVELS * p[level])

    def update(self, level, losses):
        squares = torch.zeros(LEVELS).index_add(0, level, losses ** 2)
        counts = torch.bincount(level, minlength=LEVELS).to(squares.dtype)
        fresh = self.keep * self.second + (1 - self.keep) * squares / counts.clamp(min=1)
        self.second = torch.where(counts > 0, fresh, self.second)


class Denoiser(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.level = nn.Embedding(LEVELS, 16)
        self.net = nn.Sequential(nn.Linear(18, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 2))

    def forward(self, x, level):
        return self.net(torch.cat([x, self.level(level)], dim=1))


def batch_of(step, size):
    g = torch.Generator().manual_seed(7000 + step)
    r = torch.rand(size, generator=g)
    angle = 3 * math.pi * r
    x = torch.stack([r * torch.cos(angle), r * torch.sin(angle)], dim=1) * 1.5
    return x, torch.randn(size, 2, generator=g), torch.rand(size, generator=g)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=60)
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--lr", type=float, default=3e-3)
    args = p.parse_args()

    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = DDP(Denoiser())
    opt = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-5)
    sampler = LevelSampler()
    kept = torch.cos(0.5 * math.pi * (torch.arange(LEVELS) + 0.5) / LEVELS) ** 2

    shown = torch.zeros(())
    for step in range(args.steps):
        x, noise, u = (v[rank::world].contiguous() for v in batch_of(step, args.batch))
        level, weight = sampler.sample(u)
        a = kept[level][:, None]
        guess = model(a.sqrt() * x + (1 - a).sqrt() * noise, level)
        losses = ((guess - noise) ** 2).mean(dim=1)
        loss = (weight * losses).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        sampler.update(level, losses.detach())
        shown += loss.detach() / 10
        if step % 10 == 9:
            dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step + 1} loss {shown / world:.5f}")
            shown = torch.zeros(())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
