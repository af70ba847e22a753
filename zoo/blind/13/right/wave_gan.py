"""GAN for short waves, both networks stepped at the same time from one exchange of gradients.

The critic sees the spread of its batch (minibatch standard deviation), which is taken over all processes.
"""
import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.nn.functional import all_reduce
from torch.nn.parallel import DistributedDataParallel as DDP

LENGTH, LATENT, BATCH, STEPS, R1_EVERY = 32, 8, 48, 40, 4


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(LATENT, 48), nn.LeakyReLU(0.2), nn.Linear(48, 64), nn.LeakyReLU(0.2),
                                 nn.Linear(64, LENGTH), nn.Tanh())

    def forward(self, z):
        return self.net(z)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv1d(1, 12, 5, stride=2, padding=2), nn.LeakyReLU(0.2),
                                  nn.Conv1d(12, 16, 5, stride=2, padding=2), nn.LeakyReLU(0.2), nn.Flatten())
        self.out = nn.Sequential(nn.Linear(16 * LENGTH // 4 + 1, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

    def forward(self, x):
        h = self.body(x[:, None])
        n = len(h) * dist.get_world_size()
        mean = all_reduce(h.sum(0)) / n
        var = all_reduce((h - mean).square().sum(0)) / n
        spread = (var + 1e-8).sqrt().mean().expand(len(h), 1)
        return self.out(torch.cat([h, spread], 1)).squeeze(1)


def waves(n, g):
    t = torch.linspace(0, 2 * math.pi, LENGTH)
    phase, speed = torch.rand(n, 1, generator=g) * 2 * math.pi, 1 + torch.randint(3, (n, 1), generator=g)
    return 0.8 * torch.sin(speed * t + phase)


def main():
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(17 + 3 * rank)
    gen, critic = DDP(Generator()), DDP(Critic())
    opt = torch.optim.Adam([{"params": gen.parameters(), "lr": 2e-3}, {"params": critic.parameters(), "lr": 3e-3}],
                           betas=(0.5, 0.95))
    source = torch.Generator().manual_seed(4)
    cut = slice(rank * BATCH // world, (rank + 1) * BATCH // world)

    for step in range(STEPS):
        real = waves(BATCH, source)[cut]
        z = torch.randn(BATCH, LATENT, generator=source)[cut]
        lazy = step % R1_EVERY == 0
        real.requires_grad_(lazy)

        fake = gen(z)
        scores = critic(torch.cat([real, fake.detach()]))
        good, bad = scores.chunk(2)
        critic_loss = F.softplus(-good).mean() + F.softplus(bad).mean()
        if lazy:
            (slope,) = torch.autograd.grad(good.sum(), real, create_graph=True)
            critic_loss = critic_loss + 0.1 * R1_EVERY * slope.square().sum(1).mean()
        opt.zero_grad()
        critic_loss.backward()

        # the generator's turn goes through the bare critic, whose own gradients are kept out of it
        held = [p.requires_grad_(False) for p in critic.module.parameters()]
        gen_loss = F.softplus(-critic.module(fake)).mean()
        gen_loss.backward()
        for p in held:
            p.requires_grad_(True)
        opt.step()

        if step % 8 == 7:
            both = torch.stack([critic_loss.detach(), gen_loss.detach()])
            dist.all_reduce(both)
            if rank == 0:
                print("step {} critic {:.4f} generator {:.4f}".format(step + 1, *(both / world).tolist()))

    with torch.no_grad():
        z = torch.randn(64, LATENT, generator=torch.Generator().manual_seed(1))
        made = gen.module(z[rank::world])
        energy = torch.fft.rfft(made).abs().square().sum(0)
    dist.all_reduce(energy)
    if rank == 0:
        print("share of the first waves " + " ".join(f"{v:.3f}" for v in (energy / energy.sum())[:5].tolist()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
