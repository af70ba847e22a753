"""Denoising diffusion on spiral orbits; samples come from the averaged network."""
import copy
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_default_dtype(torch.float64)

BATCH = 64
STEPS = 60
LEVELS = 50
EMA_HALFLIFE = 600


def spiral(n, seed):
    g = torch.Generator().manual_seed(seed)
    turn = 3 * math.pi * torch.rand(n, generator=g).sqrt()
    radius = turn / (3 * math.pi)
    points = torch.stack([radius * torch.cos(turn), radius * torch.sin(turn)], dim=1)
    return 2 * points + 0.03 * torch.randn(n, 2, generator=g)


class Denoiser(nn.Module):
    def __init__(self, width=64, frequencies=8):
        super().__init__()
        self.register_buffer("freq", 2.0 ** torch.arange(frequencies) / 4)
        self.inp = nn.Linear(2 + 2 * frequencies, width)
        self.mid = nn.Linear(width, width)
        self.out = nn.Linear(width, 2)

    def forward(self, x, t):
        angle = t.unsqueeze(1) * self.freq
        h = torch.cat([x, angle.sin(), angle.cos()], dim=1)
        h = nn.functional.silu(self.inp(h))
        h = h + nn.functional.silu(self.mid(h))
        return self.out(h)


def alpha_bar(t):
    return torch.cos(0.5 * math.pi * (t + 0.008) / 1.008) ** 2


class Average:
    def __init__(self, net, halflife):
        self.net = copy.deepcopy(net).requires_grad_(False)
        self.halflife = halflife

    @torch.no_grad()
    def update(self, net, images):
        beta = 0.5 ** (images / self.halflife)
        for slow, fast in zip(self.net.parameters(), net.parameters()):
            slow.lerp_(fast, 1 - beta)


@torch.no_grad()
def generate(net, n=400):
    g = torch.Generator().manual_seed(123)
    x = torch.randn(n, 2, generator=g)
    for level in range(LEVELS, 0, -1):
        t = torch.full((n,), level / LEVELS)
        a, a_next = alpha_bar(t).unsqueeze(1), alpha_bar(t - 1 / LEVELS).unsqueeze(1)
        noise = net(x, t)
        clean = ((x - (1 - a).sqrt() * noise) / a.sqrt().clamp(min=1e-2)).clamp(-3, 3)
        x = a_next.sqrt() * clean + (1 - a_next).sqrt() * noise
    return x


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()

    data = spiral(4096, seed=0)
    torch.manual_seed(50)
    net = Denoiser()
    model = DDP(net)
    average = Average(net, EMA_HALFLIFE)
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    rng = torch.Generator().manual_seed(51)

    for step in range(STEPS):
        rows = torch.randint(0, len(data), (BATCH,), generator=rng)[rank::world]
        t = torch.rand(BATCH, generator=rng)[rank::world]
        noise = torch.randn(BATCH, 2, generator=rng)[rank::world]
        x = data[rows]
        a = alpha_bar(t).unsqueeze(1)
        loss = (model(a.sqrt() * x + (1 - a).sqrt() * noise, t) - noise).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update(net, len(x))
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0 and step % 12 == 11:
            print(f"step {step + 1:3d} loss {mean.item():.8f}")

    if rank == 0:
        fake, real = generate(average.net), spiral(400, seed=9)
        distance = torch.cdist(fake, real).min(1).values.mean()
        print(f"mean distance to orbit {distance.item():.6f} spread {fake.std().item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
