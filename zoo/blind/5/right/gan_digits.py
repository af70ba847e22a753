"""GAN on digits; every process draws its own latent noise."""
import argparse
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP

ap = argparse.ArgumentParser()
ap.add_argument("--steps", type=int, default=30)
ap.add_argument("--batch", type=int, default=64, help="over all processes")
ap.add_argument("--latent", type=int, default=12)
args = ap.parse_args()
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

real = torch.tensor(load_digits().data, dtype=torch.float32) / 8 - 1
torch.manual_seed(0)
gen = DDP(nn.Sequential(nn.Linear(args.latent, 48), nn.LeakyReLU(0.2), nn.Linear(48, 64), nn.Tanh()))
disc = DDP(nn.Sequential(nn.Linear(64, 48), nn.LeakyReLU(0.2), nn.Linear(48, 24), nn.LeakyReLU(0.2), nn.Linear(24, 1)))
opt_g = torch.optim.Adam(gen.parameters(), lr=2e-3, betas=(0.5, 0.99))
opt_d = torch.optim.Adam(disc.parameters(), lr=2e-3, betas=(0.5, 0.99))

shared = torch.Generator().manual_seed(42)
private = torch.Generator().manual_seed(1000 + rank)
n = args.batch // world
for step in range(args.steps):
    rows = torch.randint(len(real), (args.batch,), generator=shared)[rank * n:(rank + 1) * n]

    noise = torch.randn(n, args.latent, generator=private)
    with torch.no_grad():
        fake = gen.module(noise)
    opt_d.zero_grad()
    score = disc(torch.cat([real[rows], fake]))
    loss_d = F.softplus(-score[:n]).mean() + F.softplus(score[n:]).mean()
    loss_d.backward()
    opt_d.step()

    disc.requires_grad_(False)
    noise = torch.randn(n, args.latent, generator=private)
    opt_g.zero_grad()
    loss_g = F.softplus(-disc.module(gen(noise))).mean()
    loss_g.backward()
    opt_g.step()
    disc.requires_grad_(True)

    if step % 10 == 9:
        log = torch.stack([loss_d.detach(), loss_g.detach()])
        dist.all_reduce(log)
        if rank == 0:
            print(f"step {step + 1}: D {log[0] / world:.4f} G {log[1] / world:.4f}")
time.sleep(0.3)
dist.destroy_process_group()
