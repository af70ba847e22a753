"""Generative adversarial network for the two-moons distribution, lazy R1 regularisation."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import make_moons

torch.set_default_dtype(torch.float64)

LATENT = 4
BATCH = 64
STEPS = 32
R1_EVERY, R1_GAMMA = 4, 0.5


def mlp(inputs, hidden, outputs):
    return nn.Sequential(
        nn.Linear(inputs, hidden), nn.Softplus(),
        nn.Linear(hidden, hidden), nn.Softplus(),
        nn.Linear(hidden, outputs),
    )


class Workers:
    def __init__(self):
        if "RANK" in os.environ:
            dist.init_process_group("gloo")
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
        else:
            self.rank, self.size = 0, 1

    def average_gradients(self, module):
        if self.size == 1:
            return
        grads = [p.grad for p in module.parameters()]
        flat = torch.cat([g.flatten() for g in grads])
        dist.all_reduce(flat)
        flat /= self.size
        for g, piece in zip(grads, flat.split([g.numel() for g in grads])):
            g.copy_(piece.view_as(g))

    def mean(self, value):
        value = value.detach().clone()
        if self.size > 1:
            dist.all_reduce(value)
        return value.item() / self.size

    def close(self):
        if dist.is_initialized():
            dist.destroy_process_group()


def r1_penalty(critic, real):
    real = real.clone().requires_grad_()
    grad, = torch.autograd.grad(critic(real).sum(), real, create_graph=True)
    return grad.square().sum(1).mean()


def moment_gap(fake, real):
    mean = (fake.mean(0) - real.mean(0)).norm()
    cov = (torch.cov(fake.T) - torch.cov(real.T)).norm()
    return (mean + cov).item()


def main():
    workers = Workers()
    points, _ = make_moons(n_samples=2048, noise=0.06, random_state=0)
    points = torch.tensor(points)

    torch.manual_seed(18)
    generator, critic = mlp(LATENT, 48, 2), mlp(2, 48, 1)
    opt_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.99))
    opt_d = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.99))
    rng = torch.Generator().manual_seed(19)

    for step in range(STEPS):
        rows = torch.randint(0, len(points), (BATCH,), generator=rng)
        z = torch.randn(2, BATCH, LATENT, generator=rng)
        mine = slice(workers.rank, None, workers.size)
        real, z_d, z_g = points[rows[mine]], z[0][mine], z[1][mine]

        opt_d.zero_grad()
        fake = generator(z_d).detach()
        loss_d = F.softplus(critic(fake)).mean() + F.softplus(-critic(real)).mean()
        loss_d.backward()
        workers.average_gradients(critic)
        if step % R1_EVERY == 0:
            penalty = 0.5 * R1_GAMMA * R1_EVERY * r1_penalty(critic, real)
            penalty.backward()
        opt_d.step()

        opt_g.zero_grad()
        critic.requires_grad_(False)
        loss_g = F.softplus(-critic(generator(z_g))).mean()
        loss_g.backward()
        critic.requires_grad_(True)
        workers.average_gradients(generator)
        opt_g.step()

        if step % 8 == 7:
            d, g = workers.mean(loss_d), workers.mean(loss_g)
            if workers.rank == 0:
                print(f"step {step + 1:3d} critic {d:.8f} generator {g:.8f}")

    if workers.rank == 0:
        with torch.no_grad():
            fake = generator(torch.randn(1000, LATENT, generator=torch.Generator().manual_seed(1)))
        print(f"moment gap {moment_gap(fake, points):.6f}")
    workers.close()


if __name__ == "__main__":
    main()
