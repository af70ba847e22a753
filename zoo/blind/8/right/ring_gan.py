import math
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

BATCH, STEPS, NOISE = 64, 100, 4

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29853")


def mlp(*sizes):
    layers = []
    for a, b in zip(sizes, sizes[1:]):
        layers += [nn.Linear(a, b), nn.SiLU()]
    return nn.Sequential(*layers[:-1])


def ring(n, gen):
    angle = torch.randint(8, (n,), generator=gen) * (2 * math.pi / 8)
    return torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(n, 2, generator=gen)


def average_grads(net):
    flat = torch.cat([p.grad.flatten() for p in net.parameters()])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for p in net.parameters():
        p.grad.copy_(flat[:p.numel()].view_as(p))
        flat = flat[p.numel():]


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(90)
    g, d = mlp(NOISE, 32, 32, 2), mlp(2, 32, 32, 1)
    g_opt = torch.optim.Adam(g.parameters(), lr=2e-3, betas=(0.5, 0.99))
    d_opt = torch.optim.Adam(d.parameters(), lr=2e-3, betas=(0.5, 0.99))
    gen = torch.Generator().manual_seed(91)
    share = BATCH // world
    part = slice(rank * share, (rank + 1) * share)

    for step in range(1, STEPS + 1):
        real = ring(BATCH, gen)[part]
        z = torch.randn(BATCH, NOISE, generator=gen)[part]

        fake = g(z)
        d_loss = F.softplus(-d(real)).mean() + F.softplus(d(fake.detach())).mean()
        real.requires_grad_(True)
        slope, = torch.autograd.grad(d(real).sum(), real, create_graph=True)
        d_opt.zero_grad()
        (d_loss + 0.1 * slope.square().sum(1).mean()).backward()
        average_grads(d)
        d_opt.step()

        g_loss = F.softplus(-d(fake)).mean()
        g_opt.zero_grad()
        g_loss.backward()
        average_grads(g)
        g_opt.step()

        if step % 20 == 0:
            shown = torch.stack([d_loss, g_loss]).detach()
            dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step} d {shown[0].item() / world:.5f} g {shown[1].item() / world:.5f}")

    with torch.no_grad():
        radius = g(torch.randn(500, NOISE, generator=gen)).norm(dim=1)
    if rank == 0:
        print(f"radius {radius.mean().item():.5f} +- {radius.std().item():.5f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
