"""Small GAN on the 8x8 digits with a lazy gradient penalty (StyleGAN2 fashion)."""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29843")

STEPS, BATCH, ZDIM, EVERY, GAMMA = 100, 64, 16, 4, 20.0


def generator_net():
    return nn.Sequential(nn.Linear(ZDIM, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh())


def critic_net():
    return nn.Sequential(
        nn.Linear(64, 64), nn.Softplus(), nn.Linear(64, 32), nn.Softplus(), nn.Linear(32, 1, bias=False)
    )


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)
    images = torch.tensor(load_digits().data, dtype=torch.float32) / 8 - 1
    G, D = DDP(generator_net()), DDP(critic_net())
    opt_g = torch.optim.SGD(G.parameters(), lr=0.05, momentum=0.5)
    opt_d = torch.optim.SGD(D.parameters(), lr=0.05, momentum=0.5)
    draw = torch.Generator().manual_seed(11)

    for step in range(STEPS):
        rows = torch.randint(len(images), (BATCH,), generator=draw)[rank::world]
        z = torch.randn(BATCH, ZDIM, generator=draw)[rank::world]
        real = images[rows]

        # critic
        opt_d.zero_grad()
        with torch.no_grad():
            fake = G(z)
        score = D(torch.cat([real, fake]))
        loss_d = F.softplus(-score[: len(real)]).mean() + F.softplus(score[len(real):]).mean()
        loss_d.backward()
        if step % EVERY == 0:
            real = real.clone().requires_grad_(True)
            out = D(real)
            (slope,) = torch.autograd.grad(out.sum(), real, create_graph=True)
            (EVERY * GAMMA / 2 * slope.square().sum(1).mean()).backward()
        opt_d.step()

        # generator
        opt_g.zero_grad()
        for p in D.parameters():
            p.requires_grad_(False)
        loss_g = F.softplus(-D.module(G(z))).mean()
        loss_g.backward()
        for p in D.parameters():
            p.requires_grad_(True)
        opt_g.step()

        if step % 20 == 19:
            both = torch.stack([loss_d.detach(), loss_g.detach()])
            dist.all_reduce(both)
            if rank == 0:
                print(f"step {step + 1}  critic {both[0] / world:.5f}  generator {both[1] / world:.5f}")

    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
