"""Wasserstein GAN on a ring of eight blobs, weights of the critic clipped in place."""
import math
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

BATCH, ROUNDS, CRITIC, LATENT, LIMIT = 64, 40, 3, 4, 0.1

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29812")


def ring(count, g):
    k = torch.randint(8, (count,), generator=g) * (2 * math.pi / 8)
    return torch.stack([k.cos(), k.sin()], 1) + 0.05 * torch.randn(count, 2, generator=g)


def mlp(inp, out):
    return nn.Sequential(nn.Linear(inp, 32), nn.LeakyReLU(0.2), nn.Linear(32, 32), nn.LeakyReLU(0.2), nn.Linear(32, out))


class Game:
    def __init__(self):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(3 + 10 * self.rank)
        self.critic = DDP(mlp(2, 1))
        self.maker = DDP(mlp(LATENT, 2))
        self.critic_opt = torch.optim.SGD(self.critic.parameters(), lr=0.05, momentum=0.5)
        self.maker_opt = torch.optim.SGD(self.maker.parameters(), lr=0.5, momentum=0.5)
        self.g = torch.Generator().manual_seed(12)

    def draw(self):
        """The whole batch is drawn everywhere, every process keeps its rows."""
        real = ring(BATCH, self.g)
        noise = torch.randn(BATCH, LATENT, generator=self.g)
        return real[self.rank :: self.world], noise[self.rank :: self.world]

    def critic_step(self):
        real, noise = self.draw()
        with torch.no_grad():
            fake = self.maker.module(noise)
        score = self.critic(torch.cat([real, fake]))
        loss = score[len(real):].mean() - score[: len(real)].mean()
        self.critic_opt.zero_grad()
        loss.backward()
        self.critic_opt.step()
        with torch.no_grad():
            for p in self.critic.module.parameters():
                p.clamp_(-LIMIT, LIMIT)
        return loss.detach()

    def maker_step(self):
        _, noise = self.draw()
        self.critic.requires_grad_(False)
        loss = -self.critic.module(self.maker(noise)).mean()
        self.maker_opt.zero_grad()
        loss.backward()
        self.maker_opt.step()
        self.critic.requires_grad_(True)


def main():
    dist.init_process_group("gloo")
    game = Game()
    for k in range(1, ROUNDS + 1):
        for _ in range(CRITIC):
            distance = game.critic_step()
        game.maker_step()
        if k % 10 == 0:
            dist.all_reduce(distance)
            if game.rank == 0:
                print(f"round {k}: distance {-distance.item() / game.world:.6f}", flush=True)
    if game.rank == 0:
        with torch.no_grad():
            points = game.maker.module(torch.randn(512, LATENT, generator=torch.Generator().manual_seed(0)))
        print(f"spread {points.std(0).mean().item():.5f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
