"""GAN on a ring of Gaussians, gradient penalty at the data, averaged generator."""
import copy
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

BATCH, LATENT, STEPS = 64, 6, 60


def mlp(*sizes):
    layers = []
    for a, b in zip(sizes, sizes[1:]):
        layers += [nn.Linear(a, b), nn.Softplus()]
    return nn.Sequential(*layers[:-1])


def ring(n, gen):
    angle = torch.randint(0, 8, (n,), generator=gen) * (2 * torch.pi / 8)
    return torch.stack([angle.cos(), angle.sin()], 1) * 2 + 0.05 * torch.randn(n, 2, generator=gen)


def trainable(module, flag):
    for p in module.parameters():
        p.requires_grad_(flag)


class Trainer:
    def __init__(self):
        self.rank, self.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        if self.world > 1:
            dist.init_process_group("gloo")
        torch.manual_seed(31)
        self.gen_net = mlp(LATENT, 48, 48, 2)
        self.disc_net = mlp(2, 48, 48, 4)
        self.average = copy.deepcopy(self.gen_net)
        trainable(self.average, False)
        wrap = DDP if self.world > 1 else (lambda m: m)
        self.gen, self.disc = wrap(self.gen_net), wrap(self.disc_net)
        self.gen_opt = torch.optim.Adam(self.gen_net.parameters(), lr=2e-3, betas=(0.0, 0.99))
        self.disc_opt = torch.optim.Adam(self.disc_net.parameters(), lr=3e-3, betas=(0.0, 0.99))

    def share(self, x):
        return x.chunk(self.world)[self.rank]

    def disc_step(self, real, z):
        trainable(self.disc_net, True)
        with torch.no_grad():
            fake = self.gen_net(z)
        real = real.clone().requires_grad_(True)
        on_real, on_fake = self.disc(torch.cat([real, fake])).mean(1).chunk(2)
        slope, = torch.autograd.grad(on_real.sum(), real, create_graph=True)
        penalty = slope.square().sum(1).mean()
        loss = F.softplus(-on_real).mean() + F.softplus(on_fake).mean() + 0.5 * penalty
        self.disc_opt.zero_grad()
        loss.backward()
        self.disc_opt.step()

    def gen_step(self, z):
        trainable(self.disc_net, False)
        loss = F.softplus(-self.disc_net(self.gen(z)).mean(1)).mean()
        self.gen_opt.zero_grad()
        loss.backward()
        self.gen_opt.step()
        with torch.no_grad():
            for slow, fast in zip(self.average.parameters(), self.gen_net.parameters()):
                slow.lerp_(fast, 0.1)

    def fit(self):
        for step in range(STEPS):
            source = torch.Generator().manual_seed(9000 + step)
            real = ring(BATCH, source)
            noise = torch.randn(2, BATCH, LATENT, generator=source)
            self.disc_step(self.share(real), self.share(noise[0]))
            self.gen_step(self.share(noise[1]))

    @torch.no_grad()
    def report(self):
        source = torch.Generator().manual_seed(1)
        made = self.average(torch.randn(400, LATENT, generator=source))
        truth = ring(400, source)
        cross = torch.cdist(made, truth).mean()
        energy = 2 * cross - torch.cdist(made, made).mean() - torch.cdist(truth, truth).mean()
        if self.rank == 0:
            print(f"energy distance {energy.item():.10f}")
            print(f"mean score of data {self.disc_net(truth).mean().item():.10f}")


def main():
    torch.set_default_dtype(torch.float64)
    trainer = Trainer()
    trainer.fit()
    trainer.report()
    if trainer.world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
