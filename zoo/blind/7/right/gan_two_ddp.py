"""Least-squares GAN on two moons, one DDP wrapper per network."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import make_moons
from torch.nn.parallel import DistributedDataParallel as DDP

BATCH, LATENT = 64, 3


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(LATENT, 64), nn.ELU(), nn.Linear(64, 64), nn.ELU(), nn.Linear(64, 2))

    def forward(self, z):
        return self.net(z)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))

    def forward(self, x):
        return self.net(x)


def main():
    for k, v in dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29717").items():
        os.environ.setdefault(k, v)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    pts, _ = make_moons(4096, noise=0.05, random_state=1)
    pts = torch.tensor(pts, dtype=torch.float32)
    torch.manual_seed(30)
    g, d = Generator(), Discriminator()
    gen, dis = DDP(g), DDP(d)
    g_opt = torch.optim.Adam(g.parameters(), lr=1e-3, betas=(0.5, 0.99))
    d_opt = torch.optim.Adam(d.parameters(), lr=1e-3, betas=(0.5, 0.99))
    rng = torch.Generator().manual_seed(8)
    shown = torch.zeros(2)

    for it in range(1, 41):
        real = pts[torch.randint(len(pts), (BATCH,), generator=rng)].chunk(world)[rank]
        z1, z2 = (torch.randn(BATCH, LATENT, generator=rng).chunk(world)[rank] for _ in range(2))

        with torch.no_grad():
            fake = g(z1)
        out = dis(torch.cat([real, fake]))
        o_real, o_fake = out.chunk(2)
        d_loss = (o_real - 1).square().mean() + o_fake.square().mean()
        d_opt.zero_grad()
        d_loss.backward()
        d_opt.step()

        d.requires_grad_(False)
        g_loss = (d(gen(z2)) - 1).square().mean()
        g_opt.zero_grad()
        g_loss.backward()
        g_opt.step()
        d.requires_grad_(True)

        shown += torch.stack([d_loss.detach(), g_loss.detach()]) / world
        if it % 10 == 0:
            total = shown / 10
            dist.all_reduce(total)
            shown.zero_()
            if rank == 0:
                print(f"iteration {it} d {total[0].item():.5f} g {total[1].item():.5f}")
    if rank == 0:
        with torch.no_grad():
            s = g(torch.randn(1000, LATENT, generator=torch.Generator().manual_seed(0)))
        print("sample mean", [round(v, 4) for v in s.mean(0).tolist()])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
