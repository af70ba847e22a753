"""Hinge GAN with a spectrally normalised critic on a ring of Gaussians."""
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.parametrizations import spectral_norm

torch.set_default_dtype(torch.float64)
rank = int(os.environ.get("RANK", 0))
world = int(os.environ.get("WORLD_SIZE", 1))
SEED, BATCH, LATENT, STEPS = 50, 64, 4, 40


def generator_net():
    return nn.Sequential(nn.Linear(LATENT, 48), nn.SiLU(), nn.Linear(48, 48), nn.SiLU(), nn.Linear(48, 2))


def critic_net():
    return nn.Sequential(
        spectral_norm(nn.Linear(2, 48)), nn.LeakyReLU(0.1),
        spectral_norm(nn.Linear(48, 48)), nn.LeakyReLU(0.1),
        spectral_norm(nn.Linear(48, 1)))


def start_from_rank_zero(net):
    if world > 1:
        for tensor in net.parameters():
            dist.broadcast(tensor.detach(), 0)


def average_gradients(net):
    if world == 1:
        return
    grads = [p.grad for p in net.parameters()]
    flat = torch.cat([g.flatten() for g in grads])
    dist.all_reduce(flat)
    flat /= world
    for g, part in zip(grads, flat.split([g.numel() for g in grads])):
        g.copy_(part.view_as(g))


class Feed:
    """Real points and latent vectors; each step is drawn whole and then divided."""

    def __init__(self, seed):
        self.gen = torch.Generator().manual_seed(seed)

    def share(self, x):
        return x.chunk(world)[rank]

    def real(self):
        angle = torch.randint(0, 8, (BATCH,), generator=self.gen) * (math.pi / 4)
        centre = torch.stack([angle.cos(), angle.sin()], 1) * 2
        return self.share(centre + 0.1 * torch.randn(BATCH, 2, generator=self.gen))

    def latent(self):
        return self.share(torch.randn(BATCH, LATENT, generator=self.gen))


def mean_over_ranks(value):
    value = value.detach().clone()
    if world > 1:
        dist.all_reduce(value)
    return value.item() / world


def main():
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(SEED + rank)
    G, D = generator_net(), critic_net()
    start_from_rank_zero(G)
    start_from_rank_zero(D)
    opt_g = torch.optim.Adam(G.parameters(), lr=2e-3, betas=(0.0, 0.9))
    opt_d = torch.optim.Adam(D.parameters(), lr=4e-3, betas=(0.0, 0.9))
    feed = Feed(SEED)

    for step in range(STEPS):
        for _ in range(2):
            real, fake = feed.real(), G(feed.latent()).detach()
            loss_d = F.relu(1 - D(real)).mean() + F.relu(1 + D(fake)).mean()
            opt_d.zero_grad()
            loss_d.backward()
            average_gradients(D)
            opt_d.step()
        D.requires_grad_(False)
        loss_g = -D(G(feed.latent())).mean()
        opt_g.zero_grad()
        loss_g.backward()
        average_gradients(G)
        opt_g.step()
        D.requires_grad_(True)
        if step % 8 == 7:
            d, g = mean_over_ranks(loss_d), mean_over_ranks(loss_g)
            if rank == 0:
                print(f"step {step + 1:3d}  critic {d:.10f}  generator {g:.10f}")

    with torch.no_grad():
        points = G(torch.randn(256, LATENT, generator=torch.Generator().manual_seed(1)))
        radius = points.norm(dim=1).mean().item()
    if rank == 0:
        print(f"mean radius {radius:.10f}")
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
