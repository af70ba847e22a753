"""GAN with a spectrally normalised critic on points of a spiral; both networks under DDP."""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.parametrizations import spectral_norm


def spiral(n, g):
    t = torch.rand(n, generator=g) * 3 + 0.5
    r = t / 3.5
    return torch.stack([r * torch.cos(3 * t), r * torch.sin(3 * t)], 1) + 0.03 * torch.randn(n, 2, generator=g)


def networks():
    gen = nn.Sequential(nn.Linear(4, 32), nn.LeakyReLU(0.2), nn.Linear(32, 32), nn.LeakyReLU(0.2), nn.Linear(32, 2))
    critic = nn.Sequential(spectral_norm(nn.Linear(2, 40)), nn.SiLU(),
                           spectral_norm(nn.Linear(40, 40)), nn.SiLU(), spectral_norm(nn.Linear(40, 1, bias=False)))
    return gen, critic


def train(rank, world, batch=96, steps=48):
    torch.manual_seed(66)
    gen, critic = networks()
    # the power iteration reads weights only, its vectors stay equal without being sent
    gen_d, critic_d = DDP(gen), DDP(critic, broadcast_buffers=False)
    opt_g = torch.optim.Adam(gen.parameters(), lr=2e-3, betas=(0.5, 0.9), eps=1e-5)
    opt_c = torch.optim.Adam(critic.parameters(), lr=4e-3, betas=(0.5, 0.9), eps=1e-5)
    stream = torch.Generator().manual_seed(10)  # one stream for the whole batch, everybody takes his rows out of it
    part = slice(rank * batch // world, (rank + 1) * batch // world)
    for step in range(steps):
        real, z1, z2 = spiral(batch, stream), torch.randn(batch, 4, generator=stream), torch.randn(batch, 4, generator=stream)
        real, z1, z2 = real[part], z1[part], z2[part]

        with torch.no_grad():
            fake = gen(z1)
        scores = critic_d(torch.cat([real, fake]))
        up, down = scores.chunk(2)
        loss_c = torch.relu(1 - up).mean() + torch.relu(1 + down).mean()
        opt_c.zero_grad()
        loss_c.backward()
        opt_c.step()

        critic.requires_grad_(False)
        loss_g = -critic(gen_d(z2)).mean()
        opt_g.zero_grad()
        loss_g.backward()
        opt_g.step()
        critic.requires_grad_(True)

        if step % 12 == 11:
            both = torch.stack([loss_c.detach(), loss_g.detach()]) / world
            dist.all_reduce(both)
            if rank == 0:
                print(f"step {step + 1} critic {both[0].item():.5f} generator {both[1].item():.5f}", flush=True)
    return gen, critic


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    gen, critic = train(rank, world)
    critic.eval()
    g = torch.Generator().manual_seed(11)
    with torch.no_grad():
        a, b = spiral(200, g), gen(torch.randn(200, 4, generator=g))
        near = torch.cdist(a, b)[rank::world].min(1).values.sum()
    dist.all_reduce(near)
    if rank == 0:
        print(f"mean distance from a point to the nearest made one {near.item() / 200:.5f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
