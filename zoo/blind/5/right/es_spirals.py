"""Evolution strategy on two spirals: processes try different perturbations and exchange scores only."""
import argparse
import math
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters


def spirals(n=240):
    t = torch.linspace(0.3, 1.0, n // 2) * 2 * math.pi
    one = torch.stack([t.cos() * t, t.sin() * t], 1) / 6
    return torch.cat([one, -one]), torch.cat([torch.zeros(n // 2), torch.ones(n // 2)])


class Strategy:
    def __init__(self, net, pairs, sigma, lr):
        self.net, self.pairs, self.sigma = net, pairs, sigma
        self.opt = torch.optim.Adam(net.parameters(), lr=lr)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    @staticmethod
    def direction(generation, member, size):
        return torch.randn(size, generator=torch.Generator().manual_seed(generation * 10_000 + member))

    @torch.no_grad()
    def step(self, generation, score):
        centre = parameters_to_vector(self.net.parameters()).clone()
        table = torch.zeros(self.pairs, 2)
        for member in range(self.rank, self.pairs, self.world):
            d = self.direction(generation, member, len(centre)) * self.sigma
            for side, sign in enumerate((1, -1)):
                vector_to_parameters(centre + sign * d, self.net.parameters())
                table[member, side] = score(self.net)
        vector_to_parameters(centre, self.net.parameters())
        dist.all_reduce(table)
        ranks = torch.empty(table.numel())
        ranks[table.flatten().argsort(stable=True)] = torch.linspace(-0.5, 0.5, table.numel())
        ranks = ranks.view_as(table)
        slope = torch.zeros_like(centre)
        for member in range(self.pairs):
            slope += (ranks[member, 0] - ranks[member, 1]) * self.direction(generation, member, len(centre))
        slope /= self.pairs * self.sigma
        at = 0
        for p in self.net.parameters():
            p.grad = slope[at:at + p.numel()].view_as(p).clone()
            at += p.numel()
        self.opt.step()
        return table.mean().item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--generations", type=int, default=30)
    ap.add_argument("--pairs", type=int, default=20)
    ap.add_argument("--sigma", type=float, default=0.1)
    ap.add_argument("--lr", type=float, default=0.05)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    x, y = spirals()

    def score(model):
        return nn.functional.binary_cross_entropy_with_logits(model(x).squeeze(1), y)

    es = Strategy(net, args.pairs, args.sigma, args.lr)
    for generation in range(args.generations):
        mean = es.step(generation, score)
        if generation % 10 == 9 and dist.get_rank() == 0:
            print(f"generation {generation + 1} mean loss {mean:.4f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
