"""Generative adversarial network for eight Gaussians on a ring, non-saturating loss with R1 penalty."""
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

LATENT, WIDTH = 4, 48
GLOBAL_BATCH, STEPS = 64, 60
R1_WEIGHT, R1_EVERY = 0.5, 4


def mlp(n_in, n_out):
    return nn.Sequential(nn.Linear(n_in, WIDTH), nn.LeakyReLU(0.2), nn.Linear(WIDTH, WIDTH), nn.LeakyReLU(0.2),
                         nn.Linear(WIDTH, n_out))


def real_points(count, gen):
    mode = torch.randint(8, (count,), generator=gen)
    angle = mode * (2 * math.pi / 8)
    center = torch.stack([angle.cos(), angle.sin()], dim=1)
    return 2 * center + 0.1 * torch.randn(count, 2, generator=gen)


class Trainer:
    def __init__(self, rank, world):
        self.rank, self.world = rank, world
        torch.manual_seed(25)
        self.g, self.d = mlp(LATENT, 2), mlp(2, 1)
        self.g_slow = mlp(LATENT, 2)
        self.g_slow.load_state_dict(self.g.state_dict())
        self.opt_g = torch.optim.Adam(self.g.parameters(), lr=2e-3, betas=(0.5, 0.9))
        self.opt_d = torch.optim.Adam(self.d.parameters(), lr=2e-3, betas=(0.5, 0.9))
        self.data_gen = torch.Generator().manual_seed(100)
        self.latent_gen = torch.Generator().manual_seed(200)

    def real(self):
        return real_points(GLOBAL_BATCH, self.data_gen)[self.rank::self.world]

    def latent(self):
        return torch.randn(GLOBAL_BATCH, LATENT, generator=self.latent_gen)[self.rank::self.world]

    def update(self, module, optimizer, loss):
        optimizer.zero_grad()
        grads = torch.autograd.grad(loss, list(module.parameters()))
        for p, grad in zip(module.parameters(), grads):
            p.grad = grad.detach().clone()
            if self.world > 1:
                dist.all_reduce(p.grad)
                p.grad /= self.world
        optimizer.step()

    def d_step(self, step):
        real = self.real()
        with torch.no_grad():
            fake = self.g(self.latent())
        loss = F.softplus(-self.d(real)).mean() + F.softplus(self.d(fake)).mean()
        if step % R1_EVERY == 0:
            real.requires_grad_()
            slope, = torch.autograd.grad(self.d(real).sum(), real, create_graph=True)
            loss = loss + R1_EVERY * R1_WEIGHT / 2 * slope.pow(2).sum(1).mean()
        self.update(self.d, self.opt_d, loss)
        return loss.detach()

    def g_step(self):
        loss = F.softplus(-self.d(self.g(self.latent()))).mean()
        self.update(self.g, self.opt_g, loss)
        with torch.no_grad():
            for slow, fast in zip(self.g_slow.parameters(), self.g.parameters()):
                slow.lerp_(fast, 0.05)
        return loss.detach()

    def mean(self, value):
        if self.world > 1:
            value = value.clone()
            dist.all_reduce(value)
        return value.item() / self.world


def main():
    torch.set_default_dtype(torch.float64)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    trainer = Trainer(rank, world)
    for step in range(STEPS):
        d_loss = trainer.mean(trainer.d_step(step))
        g_loss = trainer.mean(trainer.g_step())
        if rank == 0 and step % 20 == 19:
            print(f"step {step + 1} d {d_loss:.8f} g {g_loss:.8f}")

    if rank == 0:
        gen = torch.Generator().manual_seed(300)
        with torch.no_grad():
            points = trainer.g_slow(torch.randn(1000, LATENT, generator=gen))
        radius = points.norm(dim=1)
        print(f"samples: mean radius {radius.mean().item():.8f} spread {points.std(0).tolist()}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
