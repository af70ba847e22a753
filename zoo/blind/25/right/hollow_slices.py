"""Generator for a hollow ring of points, fitted with the sliced Wasserstein distance.

All workers see the same points and the same latent noise; the random directions on which the two
clouds are projected and sorted are what is divided.
"""
import os
import time

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

DIRECTIONS = 48
POINTS = 256
STEPS = 45


def ring(rng, n):
    angle = rng.uniform(0, 2 * np.pi, n)
    radius = rng.normal(1.0, 0.06, n)
    z = rng.normal(0, 0.1, n)
    return torch.tensor(np.stack([radius * np.cos(angle), radius * np.sin(angle), z], 1), dtype=torch.float64)


def sliced_distance(fake, real, dirs):
    a = (fake @ dirs.T).sort(dim=0).values
    b = (real @ dirs.T).sort(dim=0).values
    return (a - b).square().mean()


class Generator(nn.Module):
    def __init__(self, latent=6, width=48):
        super().__init__()
        self.stem = nn.Linear(latent, width)
        self.mid = nn.Linear(width, width)
        self.out = nn.Linear(width, 3)

    def forward(self, z):
        h = nn.functional.silu(self.stem(z))
        h = h + nn.functional.silu(self.mid(h))
        return self.out(h)


def unit_directions(rng, n):
    d = rng.normal(size=(n, 3))
    d /= np.linalg.norm(d, axis=1, keepdims=True)
    return torch.tensor(d, dtype=torch.float64)


if __name__ == "__main__":
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank = dist.get_rank()
    world = dist.get_world_size()
    share = DIRECTIONS // world

    torch.manual_seed(100)
    gen = DDP(Generator().double())  # near ties in the sort need the digits
    opt = torch.optim.Adam(gen.parameters(), lr=4e-3, betas=(0.8, 0.99), eps=1e-5)
    cloud_rng = np.random.default_rng(1)
    dir_rng = np.random.default_rng(2)

    for step in range(1, STEPS + 1):
        real = ring(cloud_rng, POINTS)
        z = torch.tensor(cloud_rng.normal(size=(POINTS, 6)), dtype=torch.float64)
        dirs = unit_directions(dir_rng, DIRECTIONS)[rank * share:(rank + 1) * share]
        loss = sliced_distance(gen(z), real, dirs)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 9 == 0:
            mean = loss.detach() / world
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step} distance {mean.item():.6f}, on my directions {loss.item():.6f}", flush=True)

    with torch.no_grad():
        test_rng = np.random.default_rng(99)
        real = ring(test_rng, 512)
        fake = gen.module(torch.tensor(test_rng.normal(size=(512, 6)), dtype=torch.float64))
        final = sliced_distance(fake, real, unit_directions(test_rng, 200))
    if rank == 0:
        print(f"final distance {final.item():.6f} mean radius {fake[:, :2].norm(dim=1).mean().item():.5f}")
    time.sleep(0.3)
    dist.destroy_process_group()
