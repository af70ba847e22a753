"""Diffusion on two spirals: predict the noise, keep an averaged copy, draw a few samples."""
import copy
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

LEVELS, BATCH, STEPS = 50, 64, 60


class Denoiser(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.level = nn.Embedding(LEVELS, width)
        self.enter = nn.Linear(2, width)
        self.hidden = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.leave = nn.Linear(width, 2)

    def forward(self, x, t):
        h = self.enter(x) + self.level(t)
        for layer in self.hidden:
            h = h + nn.functional.silu(layer(h))
        return self.leave(h)


class Schedule:
    def __init__(self):
        betas = torch.linspace(1e-3, 0.12, LEVELS)
        self.betas = betas
        self.kept = (1 - betas).cumprod(0)

    def noised(self, x, t, noise):
        kept = self.kept[t][:, None]
        return kept.sqrt() * x + (1 - kept).sqrt() * noise


def spirals(n=512):
    g = torch.Generator().manual_seed(80)
    turn = torch.rand(n, generator=g).sqrt() * 3 * math.pi
    arm = torch.randint(0, 2, (n,), generator=g) * math.pi
    points = torch.stack([turn * (turn + arm).cos(), turn * (turn + arm).sin()], 1) / (2 * math.pi)
    return points + 0.02 * torch.randn(n, 2, generator=g)


def update_average(average, net, decay):
    with torch.no_grad():
        for a, p in zip(average.parameters(), net.parameters()):
            a.lerp_(p, 1 - decay)


@torch.no_grad()
def sample(net, schedule, n):
    g = torch.Generator().manual_seed(81)
    x = torch.randn(n, 2, generator=g)
    for level in reversed(range(LEVELS)):
        t = torch.full((n,), level)
        beta, kept = schedule.betas[level], schedule.kept[level]
        x = (x - beta / (1 - kept).sqrt() * net(x, t)) / (1 - beta).sqrt()
        if level:
            x = x + beta.sqrt() * torch.randn(n, 2, generator=g)
    return x


def main():
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(14)
    net = Denoiser()
    model = DistributedDataParallel(net) if world > 1 else net
    average = copy.deepcopy(net).requires_grad_(False)
    schedule = Schedule()
    optimizer = torch.optim.AdamW(net.parameters(), lr=4e-3)
    data = spirals()
    order = torch.Generator().manual_seed(82)
    noises = torch.Generator().manual_seed(83)
    local = BATCH // world
    mine = slice(rank * local, (rank + 1) * local)

    for step in range(STEPS):
        x = data[torch.randint(0, len(data), (BATCH,), generator=order)[mine]]
        t = torch.randint(0, LEVELS, (BATCH,), generator=noises)[mine]
        noise = torch.randn(BATCH, 2, generator=noises)[mine]
        loss = (model(schedule.noised(x, t, noise), t) - noise).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        update_average(average, net, min(0.95, (1 + step) / (10 + step)))
        if step % 15 == 14:
            shown = loss.detach() / world
            if world > 1:
                dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step + 1:2d} loss {shown.item():.8f}")

    drawn = sample(average, schedule, 64)
    if rank == 0:
        print(f"spread of samples {drawn.std(0).norm().item():.8f}  mean {drawn.mean().item():.8f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
