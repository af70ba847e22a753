"""WGAN with gradient penalty on two rings; gradients are averaged by hand."""
import os

import torch
import torch.distributed as dist
from sklearn.datasets import make_circles
from torch import nn

RANK, WORLD = int(os.getenv("RANK", 0)), int(os.getenv("WORLD_SIZE", 1))
BATCH = 64
LATENT = 4
N_CRITIC = 3


def sync(module):
    if WORLD == 1:
        return
    for p in module.parameters():
        dist.all_reduce(p.grad)
        p.grad /= WORLD


def mlp(i, o):
    return nn.Sequential(nn.Linear(i, 48), nn.LeakyReLU(0.2), nn.Linear(48, 48), nn.LeakyReLU(0.2), nn.Linear(48, o))


def penalty(critic, real, fake, mix):
    at = (mix * real + (1 - mix) * fake).requires_grad_()
    g, = torch.autograd.grad(critic(at).sum(), at, create_graph=True)
    return (g.norm(dim=1) - 1).square().mean()


class Sampler:
    def __init__(self, data, seed):
        self.data = data
        self.gen = torch.Generator().manual_seed(seed)

    def real(self):
        idx = torch.randint(len(self.data), (BATCH,), generator=self.gen)
        return self.data[idx.chunk(WORLD)[RANK]]

    def latent(self):
        return torch.randn(BATCH // WORLD, LATENT, generator=self.gen)

    def mix(self):
        return torch.rand(BATCH // WORLD, 1, generator=self.gen)


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    points, _ = make_circles(2048, noise=0.04, factor=0.5, random_state=0)
    torch.manual_seed(123)
    gen, critic = mlp(LATENT, 2), mlp(2, 1)
    g_opt = torch.optim.Adam(gen.parameters(), lr=1e-3, betas=(0.0, 0.9))
    c_opt = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.0, 0.9))
    sampler = Sampler(torch.tensor(points, dtype=torch.float32), 50)

    for it in range(30):
        for _ in range(N_CRITIC):
            real = sampler.real()
            fake = gen(sampler.latent()).detach()
            loss_c = critic(fake).mean() - critic(real).mean() + 5 * penalty(critic, real, fake, sampler.mix())
            c_opt.zero_grad()
            loss_c.backward()
            sync(critic)
            c_opt.step()
        loss_g = -critic(gen(sampler.latent())).mean()
        g_opt.zero_grad()
        loss_g.backward()
        sync(gen)
        g_opt.step()
        if it % 10 == 9:
            out = torch.stack([loss_c.detach(), loss_g.detach()])
            if WORLD > 1:
                dist.all_reduce(out)
            if RANK == 0:
                print(f"{it + 1:3d} critic {out[0].item() / WORLD:+.5f} generator {out[1].item() / WORLD:+.5f}")
    if RANK == 0:
        z = torch.randn(512, LATENT, generator=torch.Generator().manual_seed(0))
        print(f"mean radius {gen(z).norm(dim=1).mean().item():.5f}")
    if WORLD > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
