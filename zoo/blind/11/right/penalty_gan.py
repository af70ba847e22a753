import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import make_circles
from torch.nn.parallel import DistributedDataParallel as DDP

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29846")

BATCH, NOISE, STEPS = 64, 4, 60


def mlp(n_in, n_out, width=32):
    return nn.Sequential(nn.Linear(n_in, width), nn.Softplus(), nn.Linear(width, width), nn.Softplus(),
                         nn.Linear(width, n_out))


def slope(scores, points):
    (g,) = torch.autograd.grad(scores.sum(), points, create_graph=True)
    return g.square().sum(1).mean()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    real = torch.tensor(make_circles(2000, noise=0.03, factor=0.5, random_state=2)[0], dtype=torch.float32)
    torch.manual_seed(rank)
    G, D = DDP(mlp(NOISE, 2)), DDP(mlp(2, 1))
    opt_g = torch.optim.Adam(G.parameters(), lr=2e-3, betas=(0.5, 0.99), eps=1e-6)
    opt_d = torch.optim.Adam(D.parameters(), lr=2e-3, betas=(0.5, 0.99), eps=1e-6)
    for step in range(STEPS):
        gen = torch.Generator().manual_seed(step)
        rows = torch.randint(len(real), (BATCH,), generator=gen)
        z = torch.randn(2, BATCH, NOISE, generator=gen)
        mine = slice(rank, None, world)

        points = real[rows][mine].requires_grad_()
        with torch.no_grad():
            fake = G.module(z[0, mine])
        true_score, fake_score = D(torch.cat([points, fake])).chunk(2)
        d_loss = F.softplus(-true_score).mean() + F.softplus(fake_score).mean() + 0.5 * slope(true_score, points)
        opt_d.zero_grad()
        d_loss.backward()
        opt_d.step()

        for p in D.parameters():
            p.requires_grad_(False)
        g_loss = F.softplus(-D.module(G(z[1, mine]))).mean()
        opt_g.zero_grad()
        g_loss.backward()
        opt_g.step()
        for p in D.parameters():
            p.requires_grad_(True)

        if step % 15 == 14:
            both = torch.stack([d_loss.detach(), g_loss.detach()]) / world
            dist.all_reduce(both)
            if rank == 0:
                print(f"step {step + 1} critic {both[0].item():.5f} forger {both[1].item():.5f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
