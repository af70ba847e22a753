"""A GAN for points on rings: two DDP models, alternating optimizers, an averaged generator for the evaluation.

Latent noise is drawn independently on every rank (seed + rank), so the draws depend on the number of processes.
"""
import copy
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

LATENT, BATCH, STEPS = 8, 128, 120
CRITIC_STEPS = 2


def setup():
    rank, world = int(os.getenv("RANK", "0")), int(os.getenv("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    return rank, world


def rings(count, g):
    radius = 0.5 + 0.5 * torch.randint(2, (count, 1), generator=g)
    angle = 2 * math.pi * torch.rand(count, 1, generator=g)
    points = radius * torch.cat([angle.cos(), angle.sin()], 1)
    return points + 0.02 * torch.randn(count, 2, generator=g)


def mlp(n_in, n_out, width=48):
    return nn.Sequential(
        nn.Linear(n_in, width), nn.LeakyReLU(0.2),
        nn.Linear(width, width), nn.LeakyReLU(0.2),
        nn.Linear(width, n_out))


def bare(model):
    return model.module if isinstance(model, DDP) else model


class Latent:
    def __init__(self, rank, world):
        self.rank, self.world = rank, world
        self.generator = torch.Generator().manual_seed(5000 + rank)

    def __call__(self, count):
        return torch.randn(count, LATENT, generator=self.generator)


def mmd(a, b):
    def kernel(u, v):
        d = torch.cdist(u, v).square()
        return sum(torch.exp(-d / s) for s in (0.02, 0.1, 0.5)).mean()

    return kernel(a, a) + kernel(b, b) - 2 * kernel(a, b)


def main():
    rank, world = setup()
    torch.manual_seed(40)
    gen, disc = mlp(LATENT, 2), mlp(2, 1)
    average = copy.deepcopy(gen).requires_grad_(False)
    if world > 1:
        gen, disc = DDP(gen), DDP(disc)
    opt_g = torch.optim.Adam(gen.parameters(), lr=1e-3, betas=(0.5, 0.9))
    opt_d = torch.optim.Adam(disc.parameters(), lr=2e-3, betas=(0.5, 0.9))
    local = BATCH // world
    real = rings(4096, torch.Generator().manual_seed(1))
    picks = torch.Generator().manual_seed(2)
    latent = Latent(rank, world)
    fixed_z = torch.randn(512, LATENT, generator=torch.Generator().manual_seed(3))
    reference = rings(512, torch.Generator().manual_seed(4))
    sums = torch.zeros(2)

    for step in range(1, STEPS + 1):
        for _ in range(CRITIC_STEPS):
            rows = torch.randint(len(real), (BATCH,), generator=picks)[rank * local : (rank + 1) * local]
            with torch.no_grad():
                fake = bare(gen)(latent(local))
            score = disc(torch.cat([real[rows], fake]))
            d_loss = F.relu(1 - score[:local]).mean() + F.relu(1 + score[local:]).mean()
            opt_d.zero_grad()
            d_loss.backward()
            opt_d.step()

        for p in disc.parameters():
            p.requires_grad_(False)
        g_loss = -bare(disc)(gen(latent(local))).mean()
        opt_g.zero_grad()
        g_loss.backward()
        opt_g.step()
        for p in disc.parameters():
            p.requires_grad_(True)

        with torch.no_grad():
            beta = min(0.95, step / (step + 10))
            for pa, pg in zip(average.parameters(), bare(gen).parameters()):
                pa.lerp_(pg, 1 - beta)
        sums += torch.tensor([d_loss.item(), g_loss.item()])

        if step % 40 == 0:
            if world > 1:
                dist.all_reduce(sums)
            sums /= 40 * world
            if rank == 0:
                distance = mmd(average(fixed_z), reference).item()
                print(f"step {step}: d {sums[0]:.5f}  g {sums[1]:.5f}  mmd {distance:.6f}")
            sums.zero_()
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
