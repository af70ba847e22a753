"""GAN on a ring of Gaussians: the critic's parameters are switched off while the generator learns."""
import argparse
import math
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def mlp(*sizes):
    layers = []
    for a, b in zip(sizes, sizes[1:]):
        layers += [nn.Linear(a, b), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers[:-1])


def ring(n, gen):
    k = torch.randint(8, (n,), generator=gen) * (2 * math.pi / 8)
    centre = torch.stack([k.cos(), k.sin()], 1)
    return centre + 0.1 * torch.randn(n, 2, generator=gen)


def switch(module, on):
    for p in module.parameters():
        p.requires_grad_(on)


class Gan:
    def __init__(self, args):
        torch.manual_seed(args.seed)
        self.g, self.d = DDP(mlp(8, 48, 48, 2)), DDP(mlp(2, 48, 48, 1))
        self.og = torch.optim.Adam(self.g.parameters(), lr=1e-3, betas=(0.5, 0.9), eps=1e-4)
        self.od = torch.optim.Adam(self.d.parameters(), lr=2e-3, betas=(0.5, 0.9), eps=1e-4)

    def critic_step(self, real, z):
        switch(self.d, True)
        with torch.no_grad():
            fake = self.g.module(z)
        both = self.d(torch.cat([real, fake])).squeeze(1)
        target = torch.cat([torch.ones(len(real)), torch.zeros(len(fake))])
        loss = F.binary_cross_entropy_with_logits(both, target)
        self.od.zero_grad()
        loss.backward()
        self.od.step()
        return loss.detach()

    def generator_step(self, z):
        switch(self.d, False)
        loss = F.softplus(-self.d.module(self.g(z))).mean()
        self.og.zero_grad()
        loss.backward()
        self.og.step()
        return loss.detach()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--seed", type=int, default=70)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    gan = Gan(args)
    source = torch.Generator().manual_seed(1)
    own = slice(rank, None, world)
    for step in range(args.steps):
        real = ring(args.batch, source)[own]
        z = torch.randn(2, args.batch, 8, generator=source)[:, own]
        losses = torch.stack([gan.critic_step(real, z[0]), gan.generator_step(z[1])])
        dist.all_reduce(losses)
        if rank == 0 and step % 6 == 5:
            d, g = (losses / world).tolist()
            print(f"step {step + 1} critic {d:.4f} generator {g:.4f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
