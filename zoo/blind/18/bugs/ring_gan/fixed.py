"""GAN for eight points on a ring, non-saturating loss, gradient penalty on real samples every fourth step."""
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

BATCH, LATENT, STEPS, PENALTY, EVERY = 64, 6, 60, 2.0, 4


def mlp(inputs, outputs, width=24):
    return nn.Sequential(nn.Linear(inputs, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, outputs))


def ring(count, gen):
    k = torch.randint(8, (count,), generator=gen)
    centre = torch.stack([(k * math.pi / 4).cos(), (k * math.pi / 4).sin()], 1)
    return centre + 0.05 * torch.randn(count, 2, generator=gen)


class Source:
    """Draws the batch of the whole job and hands out this rank's rows."""

    def __init__(self, seed, rank, world):
        self.gen = torch.Generator().manual_seed(seed)
        self.rows = slice(rank, None, world)

    def real(self):
        return ring(BATCH, self.gen)[self.rows]

    def latent(self):
        return torch.randn(BATCH, LATENT, generator=self.gen)[self.rows]


def penalty(critic, real):
    real = real.clone().requires_grad_(True)
    score = critic(real)
    slope, = torch.autograd.grad(score.sum(), real, create_graph=True)
    return slope.pow(2).sum(1).mean() + 0.0 * score.sum()


def spread(net_g, gen):
    """Mean distance of generated points to the ring and share of corners that are hit."""
    with torch.no_grad():
        made = net_g(torch.randn(512, LATENT, generator=gen))
    distance = (made.norm(dim=1) - 1).abs().mean().item()
    corner = (torch.atan2(made[:, 1], made[:, 0]) / (math.pi / 4)).round().long() % 8
    return distance, torch.bincount(corner, minlength=8).max().item() / len(made)


def main():
    torch.set_default_dtype(torch.float64)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    torch.manual_seed(40)
    net_g, net_d = mlp(LATENT, 2), mlp(2, 1)
    if world > 1:
        dist.init_process_group("gloo")
        model_g, model_d = DDP(net_g), DDP(net_d)
    else:
        model_g, model_d = net_g, net_d
    opt_g = torch.optim.Adam(net_g.parameters(), lr=2e-3, betas=(0.0, 0.99))
    opt_d = torch.optim.Adam(net_d.parameters(), lr=2e-3, betas=(0.0, 0.99))
    source = Source(41, rank, world)

    for step in range(STEPS):
        real, latent = source.real(), source.latent()
        with torch.no_grad():
            fake = model_g(latent)
        loss_d = F.softplus(-model_d(real)).mean() + F.softplus(model_d(fake)).mean()
        opt_d.zero_grad()
        loss_d.backward()
        if step % EVERY == 0:
            r1 = penalty(model_d, real)
            (PENALTY / 2 * EVERY * r1).backward()
        opt_d.step()

        loss_g = F.softplus(-model_d(model_g(source.latent()))).mean()
        opt_g.zero_grad()
        loss_g.backward()
        opt_g.step()

        if step % 15 == 14:
            values = torch.stack([loss_d.detach(), loss_g.detach()])
            if world > 1:
                dist.all_reduce(values)
                values /= world
            distance, most = spread(net_g, torch.Generator().manual_seed(step))
            if rank == 0:
                print(f"step {step + 1} critic {values[0]:.8f} generator {values[1]:.8f} off ring {distance:.6f} top {most:.3f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
