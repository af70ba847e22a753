"""A GAN that draws Barnsley's fern: feature matching for the generator.

The critic is trained to tell points of the fern from drawn ones. The generator is asked
to reproduce the mean and the mean square of the critic's features over the batch.
"""
import os
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

NOISE = 6
BATCH = 64


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t):
        t = t.clone()
        dist.all_reduce(t)
        return t

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


def fern(count, seed):
    """Points of the fern, scaled to about [-1, 1]."""
    rng = np.random.default_rng(seed)
    maps = np.array([[0, 0, 0, 0.16, 0, 0], [0.85, 0.04, -0.04, 0.85, 0, 1.6],
                     [0.2, -0.26, 0.23, 0.22, 0, 1.6], [-0.15, 0.28, 0.26, 0.24, 0, 0.44]])
    picks = rng.choice(4, size=count + 50, p=[0.01, 0.85, 0.07, 0.07])
    points, x, y = [], 0.0, 0.0
    for k in picks:
        a, b, c, d, e, f = maps[k]
        x, y = a * x + b * y + e, c * x + d * y + f
        points.append((x / 2.5, y / 5 - 1))
    points = np.array(points[50:])
    return torch.tensor(points[rng.permutation(count)], dtype=torch.float32)


class Generator(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.draw = nn.Sequential(nn.Linear(NOISE, width), nn.SiLU(), nn.Linear(width, width),
                                  nn.SiLU(), nn.Linear(width, 2))

    def forward(self, z):
        return self.draw(z)


class Critic(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(2, width), nn.SiLU(), nn.Linear(width, 24), nn.Tanh())
        self.verdict = nn.Linear(24, 1)

    def forward(self, points):
        return self.verdict(self.features(points)).squeeze(1)


def mean_over_ranks(t, world):
    return SumOverRanks.apply(t) / world


def moments(features):
    return torch.cat([features.mean(dim=0), features.pow(2).mean(dim=0)])


def critic_loss(critic, real, drawn):
    return F.softplus(-critic(real)).mean() + F.softplus(critic(drawn)).mean()


def matching_loss(critic, real, drawn, world):
    wanted = moments(critic.features(real))
    got = moments(critic.features(drawn))
    return (wanted.detach() - got).pow(2).sum()


def update(net, optimizer, loss, world):
    params = list(net.parameters())
    for p, g in zip(params, torch.autograd.grad(loss, params)):
        dist.all_reduce(g)
        p.grad = g / world
    optimizer.step()


def main(steps=40):
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(41)
    generator, critic = Generator(), Critic()
    draw_opt = torch.optim.Adam(generator.parameters(), lr=4e-3, betas=(0.5, 0.99))
    judge_opt = torch.optim.Adam(critic.parameters(), lr=4e-3, betas=(0.5, 0.99))
    points = fern(BATCH * steps, seed=9)
    noise = torch.Generator().manual_seed(90)

    for step in range(steps):
        real = points[step * BATCH:(step + 1) * BATCH].chunk(world)[rank]
        z = torch.randn(2, BATCH, NOISE, generator=noise).chunk(world, dim=1)[rank]

        judged = critic_loss(critic, real, generator(z[0]).detach())
        update(critic, judge_opt, judged, world)
        matched = matching_loss(critic, real, generator(z[1]), world)
        update(generator, draw_opt, matched, world)

        if step % 8 == 0 or step == steps - 1:
            shown = mean_over_ranks(torch.stack([judged.detach(), matched.detach()]), world)
            if rank == 0:
                print(f"step {step:2d} critic {shown[0].item():.4f} matching {shown[1].item():.5f}", flush=True)

    if rank == 0:
        with torch.no_grad():
            drawn = generator(torch.randn(2000, NOISE, generator=noise))
        fresh = fern(2000, seed=10)
        gap = (drawn.mean(0) - fresh.mean(0)).norm().item()
        print(f"gap of the means {gap:.4f}, spread {drawn.std(0).tolist()}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
