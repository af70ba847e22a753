"""Spectrally normalised GAN on two rings; noise comes from a counter, not from the process."""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import make_circles
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.parametrizations import spectral_norm

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "30064")

STEPS, BATCH, Z = 70, 64, 4


def noise(step, player, rows):
    """Row i of step s always gets the same noise, whoever computes it."""
    g = torch.Generator().manual_seed(1_000_003 * step + player)
    return torch.randn(BATCH, Z, generator=g)[rows]


def sn(i, o):
    return spectral_norm(nn.Linear(i, o))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    points, _ = make_circles(1024, noise=0.05, factor=0.4, random_state=2)
    points = torch.tensor(points, dtype=torch.float32)
    # process-specific seed; DDP starts from process 0's weights and buffers
    torch.manual_seed(500 + rank)
    G = DDP(nn.Sequential(nn.Linear(Z, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2)))
    D = DDP(nn.Sequential(sn(2, 32), nn.LeakyReLU(0.2), sn(32, 32), nn.LeakyReLU(0.2), sn(32, 1)))
    opt_g = torch.optim.SGD(G.parameters(), lr=0.05)
    opt_d = torch.optim.SGD(D.parameters(), lr=0.05)
    rows = torch.arange(rank, BATCH, world)

    for step in range(STEPS):
        pick = torch.randperm(len(points), generator=torch.Generator().manual_seed(step))[:BATCH]
        real = points[pick[rows]]

        with torch.no_grad():
            fake = G.module(noise(step, 0, rows))
        opt_d.zero_grad()
        s = D(torch.cat([real, fake]))
        loss_d = F.relu(1 - s[:len(rows)]).mean() + F.relu(1 + s[len(rows):]).mean()
        loss_d.backward()
        opt_d.step()

        opt_g.zero_grad()
        # D's gradients of this pass are local and thrown away by the next zero_grad
        loss_g = -D.module(G(noise(step, 1, rows))).mean()
        loss_g.backward()
        opt_g.step()

        if step % 14 == 13:
            both = torch.stack([loss_d.detach(), loss_g.detach()]) / world
            dist.all_reduce(both)
            if rank == 0:
                print(f"step {step + 1} critic {both[0]:.5f} generator {both[1]:.5f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
