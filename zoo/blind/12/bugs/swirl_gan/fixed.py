"""A GAN on a swirl of points. Batch of all processes together: 96."""
import argparse
import os
import time

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import softplus
from torch.nn.parallel import DistributedDataParallel as DDP


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--batch", type=int, default=96)
    p.add_argument("--steps", type=int, default=40)
    p.add_argument("--lr", type=float, default=0.02)
    p.add_argument("--noise", type=int, default=4)
    return p.parse_args()


def swirl(n):
    rng = np.random.default_rng(4)
    t = np.sqrt(rng.uniform(size=n)) * 9
    pts = np.stack([t * np.cos(t), t * np.sin(t)], 1) / 9 + rng.normal(scale=0.02, size=(n, 2))
    return torch.from_numpy(pts)


def mlp(i, o, width=32):
    return nn.Sequential(nn.Linear(i, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, o))


def make_optimizers(gen, dis, args, world):
    lr = args.lr
    return (torch.optim.SGD(gen.parameters(), lr=lr), torch.optim.SGD(dis.parameters(), lr=lr, momentum=0.5))


def frozen(module, flag):
    for p in module.parameters():
        p.requires_grad_(not flag)


def main():
    args = parse()
    torch.set_default_dtype(torch.float64)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(8)
    gen, dis = DDP(mlp(args.noise, 2)), DDP(mlp(2, 1))
    opt_g, opt_d = make_optimizers(gen, dis, args, world)
    data = swirl(3000)
    g = torch.Generator().manual_seed(15)
    own = slice(rank * args.batch // world, (rank + 1) * args.batch // world)

    for step in range(args.steps):
        real = data[torch.randint(len(data), (args.batch,), generator=g)][own]
        z = torch.randn(args.batch, args.noise, generator=g)[own]

        with torch.no_grad():
            fake = gen.module(z)
        scores = dis(torch.cat([real, fake]))
        real_score, fake_score = scores.chunk(2)
        loss_d = (softplus(-real_score) + softplus(fake_score)).mean()
        opt_d.zero_grad()
        loss_d.backward()
        opt_d.step()

        frozen(dis.module, True)
        loss_g = softplus(-dis.module(gen(z))).mean()
        opt_g.zero_grad()
        loss_g.backward()
        opt_g.step()
        frozen(dis.module, False)

        if step % 10 == 9:
            both = torch.stack([loss_d.detach(), loss_g.detach()])
            dist.all_reduce(both)
            if rank == 0:
                print(step + 1, " ".join(f"{v / world:.6f}" for v in both.tolist()))
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
