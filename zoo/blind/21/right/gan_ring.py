"""GAN on a ring of Gaussians with an averaged generator; rank 0 scores the samples."""
import copy
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

Z, BATCH, STEPS = 6, 64, 40


def real_batch(g):
    k = torch.randint(0, 8, (BATCH,), generator=g) * (2 * torch.pi / 8)
    mean = torch.stack([k.cos(), k.sin()], 1).to(torch.get_default_dtype())
    return 2 * mean + 0.1 * torch.randn(BATCH, 2, generator=g)


def generator():
    return nn.Sequential(nn.Linear(Z, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 2))


def critic():
    return nn.Sequential(nn.Linear(2, 48), nn.LeakyReLU(0.2), nn.Linear(48, 48), nn.LeakyReLU(0.2), nn.Linear(48, 1))


def mode_distance(points):
    k = torch.arange(8) * (2 * torch.pi / 8)
    modes = 2 * torch.stack([k.cos(), k.sin()], 1).to(points.dtype)
    d = torch.cdist(points, modes)
    return d.min(1).values.mean() + d.min(0).values.mean()


def main():
    multi = "RANK" in os.environ
    if multi:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if multi else 0
    world = dist.get_world_size() if multi else 1
    per = BATCH // world
    own = slice(rank * per, (rank + 1) * per)

    torch.manual_seed(4)
    gen, cri = generator(), critic()
    smooth = copy.deepcopy(gen).requires_grad_(False)
    gen_p, cri_p = (DDP(gen), DDP(cri)) if multi else (gen, cri)
    gen_opt = torch.optim.Adam(gen.parameters(), lr=2e-3, betas=(0.5, 0.99), eps=1e-6)
    cri_opt = torch.optim.Adam(cri.parameters(), lr=3e-3, betas=(0.5, 0.99), eps=1e-6)
    stream = torch.Generator().manual_seed(31)

    for step in range(STEPS):
        for _ in range(2):
            real = real_batch(stream)[own]
            z = torch.randn(BATCH, Z, generator=stream)[own]
            with torch.no_grad():
                fake = gen(z)
            score = cri_p(torch.cat([real, fake]))
            d_loss = F.softplus(-score[:per]).mean() + F.softplus(score[per:]).mean()
            cri_opt.zero_grad()
            d_loss.backward()
            cri_opt.step()

        z = torch.randn(BATCH, Z, generator=stream)[own]
        cri.requires_grad_(False)
        g_loss = F.softplus(-cri(gen_p(z))).mean()
        gen_opt.zero_grad()
        g_loss.backward()
        gen_opt.step()
        cri.requires_grad_(True)

        with torch.no_grad():
            for a, b in zip(smooth.parameters(), gen.parameters()):
                a.lerp_(b, 0.1)

        if step % 10 == 9:
            report = torch.zeros(1)
            if rank == 0:
                z = torch.randn(200, Z, generator=torch.Generator().manual_seed(99))
                with torch.no_grad():
                    report[0] = mode_distance(smooth(z))
            losses = torch.stack([d_loss.detach(), g_loss.detach()]) / world
            if multi:
                dist.broadcast(report, src=0)
                dist.all_reduce(losses)
            if report.item() < 2.2:
                for group in gen_opt.param_groups + cri_opt.param_groups:
                    group["lr"] *= 0.5
            if rank == 0:
                print(f"step {step} critic {losses[0]:.5f} generator {losses[1]:.5f} distance {report.item():.5f}")
    if multi:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
