"""Adversarial model of a small table with two clusters of correlated columns."""
import argparse
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def real_rows(n=1024):
    g = torch.Generator().manual_seed(40)
    mix = torch.randn(2, 8, 8, generator=g) * 0.4
    centre = torch.randn(2, 8, generator=g)
    which = torch.randint(0, 2, (n,), generator=g)
    z = torch.randn(n, 8, generator=g)
    return centre[which] + torch.einsum("nij,nj->ni", mix[which], z)


def mlp(i, h, o):
    return nn.Sequential(nn.Linear(i, h), nn.LeakyReLU(0.2), nn.Linear(h, h), nn.LeakyReLU(0.2), nn.Linear(h, o))


class Game:
    def __init__(self, args):
        torch.manual_seed(12)
        self.gen, self.critic = DDP(mlp(6, 40, 8)), DDP(mlp(8, 40, 1))
        self.gen_opt = torch.optim.Adam(self.gen.parameters(), lr=args.lr, betas=(0.5, 0.99))
        self.critic_opt = torch.optim.Adam(self.critic.parameters(), lr=args.lr, betas=(0.5, 0.99))
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def mine(self, t):
        return t.chunk(self.world)[self.rank]

    def noise(self):
        return self.mine(torch.randn(self.args.batch, 6))

    def critic_step(self, rows):
        self.critic_opt.zero_grad()
        with torch.no_grad():
            fake = self.gen.module(self.noise())
        score = self.critic(torch.cat([rows, fake])).squeeze(1)
        target = torch.cat([torch.full((len(rows),), 0.9), torch.zeros(len(fake))])
        loss = F.binary_cross_entropy_with_logits(score, target)
        loss.backward()
        self.critic_opt.step()
        return loss.detach()

    def gen_step(self):
        self.gen_opt.zero_grad()
        score = self.critic.module(self.gen(self.noise())).squeeze(1)
        loss = F.binary_cross_entropy_with_logits(score, torch.ones_like(score))
        loss.backward()
        self.gen_opt.step()
        return loss.detach()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--lr", type=float, default=2e-3)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = real_rows()
    game = Game(args)
    for step in range(args.steps):
        pick = game.mine(torch.randint(0, len(rows), (args.batch,)))
        losses = torch.stack([game.critic_step(rows[pick]), game.gen_step()])
        if step % 10 == 9:
            dist.all_reduce(losses)
            losses /= game.world
            with torch.no_grad():
                sample = game.gen.module(torch.randn(512, 6))
            gap = (sample.mean(0) - rows.mean(0)).norm()
            if game.rank == 0:
                print(f"{step + 1} critic {losses[0]:.5f} generator {losses[1]:.5f} gap {gap:.5f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
