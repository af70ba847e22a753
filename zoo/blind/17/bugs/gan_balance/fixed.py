"""A small GAN on a ring of Gaussians; the critic pauses while it is too far ahead."""
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

rank = int(os.environ.get("RANK", 0))
world = int(os.environ.get("WORLD_SIZE", 1))
BATCH, NOISE, STEPS = 32, 6, 60
AHEAD = 1.30


def mlp(inputs, outputs, width=24):
    return nn.Sequential(
        nn.Linear(inputs, width), nn.LeakyReLU(0.2),
        nn.Linear(width, width), nn.LeakyReLU(0.2),
        nn.Linear(width, outputs),
    )


def mean_over_ranks(t):
    t = t.detach().clone()
    if world > 1:
        dist.all_reduce(t)
        t /= world
    return t


def average_gradients(net):
    if world == 1:
        return
    flat = torch.cat([p.grad.flatten() for p in net.parameters()])
    dist.all_reduce(flat)
    flat /= world
    offset = 0
    for p in net.parameters():
        p.grad.copy_(flat[offset:offset + p.numel()].view_as(p))
        offset += p.numel()


def ring(n):
    g = torch.Generator().manual_seed(50)
    angle = torch.randint(0, 8, (n,), generator=g) * (math.pi / 4)
    centre = torch.stack([angle.cos(), angle.sin()], 1)
    return 1.5 * centre + 0.1 * torch.randn(n, 2, generator=g)


def main():
    if world > 1:
        dist.init_process_group("gloo")
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(15)
    generator, critic = mlp(NOISE, 2), mlp(2, 1)
    opt_g = torch.optim.Adam(generator.parameters(), lr=4e-3, betas=(0.5, 0.99))
    opt_c = torch.optim.Adam(critic.parameters(), lr=4e-3, betas=(0.5, 0.99))
    points = ring(1024)
    draws = torch.Generator().manual_seed(51)
    updates = 0

    for step in range(STEPS):
        rows = torch.randint(0, len(points), (BATCH,), generator=draws)[rank::world]
        noise = torch.randn(2, BATCH, NOISE, generator=draws)[:, rank::world]

        real, fake = critic(points[rows]), critic(generator(noise[0]).detach())
        loss_c = F.softplus(-real).mean() + F.softplus(fake).mean()
        opt_c.zero_grad()
        loss_c.backward()
        average_gradients(critic)
        level = mean_over_ranks(loss_c)
        if level.item() > AHEAD:
            opt_c.step()
            updates += 1

        loss_g = F.softplus(-critic(generator(noise[1]))).mean()
        opt_g.zero_grad()
        loss_g.backward()
        average_gradients(generator)
        opt_g.step()

        shown = mean_over_ranks(torch.stack([loss_c, loss_g]))
        if rank == 0 and step % 10 == 9:
            print(f"step {step + 1:2d}  critic {shown[0].item():.8f}  generator {shown[1].item():.8f}  updates {updates}")

    if rank == 0:
        for label, net in (("generator", generator), ("critic", critic)):
            size = math.sqrt(sum(float(p.detach().square().sum()) for p in net.parameters()))
            print(f"{label} norm {size:.10f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
