"""Population-based training: eight members, each trained by one owner rank; the bad copy the good.

Ranks hold different models on purpose.  Everything a member does depends on its number and the round.
"""
import argparse
import copy
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import make_moons
from torch import nn

MEMBERS = 8


class World:
    def __init__(self):
        self.size, self.rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
        if self.size > 1:
            dist.init_process_group("gloo")

    def owner(self, member):
        return member % self.size

    def table(self, values):
        """{member: number} of this rank -> list over all members."""
        t = torch.zeros(MEMBERS)
        for m, v in values.items():
            t[m] = v
        if self.size > 1:
            dist.all_reduce(t)
        return t.tolist()

    def publish(self, tensor, src):
        if self.size > 1:
            dist.broadcast(tensor, src=src)
        return tensor

    def close(self):
        if self.size > 1:
            dist.destroy_process_group()


class Member:
    def __init__(self, number, hyper):
        self.number = number
        g = torch.Generator().manual_seed(number)
        self.net = nn.Sequential(nn.Linear(2, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 2))
        for p in self.net.parameters():
            nn.init.uniform_(p, -0.4, 0.4, generator=g)
        self.opt = torch.optim.SGD(self.net.parameters(), lr=hyper["lr"], momentum=0.9, weight_decay=hyper["wd"])
        for p in self.net.parameters():
            self.opt.state[p]["momentum_buffer"] = torch.zeros_like(p)

    def use(self, hyper):
        self.opt.param_groups[0].update(lr=hyper["lr"], weight_decay=hyper["wd"])

    def train(self, x, y, round_, steps):
        g = torch.Generator().manual_seed(10_000 + 100 * round_ + self.number)
        for _ in range(steps):
            ids = torch.randint(0, len(x), (32,), generator=g)
            self.opt.zero_grad()
            F.cross_entropy(self.net(x[ids]), y[ids]).backward()
            self.opt.step()

    @torch.no_grad()
    def score(self, x, y):
        return F.cross_entropy(self.net(x), y).item()

    def tensors(self):
        for p in self.net.parameters():
            yield p.data
            yield self.opt.state[p]["momentum_buffer"]

    def pack(self):
        return torch.cat([t.flatten() for t in self.tensors()])

    def unpack(self, flat):
        own = list(self.tensors())
        for t, piece in zip(own, flat.split([t.numel() for t in own])):
            t.copy_(piece.view_as(t))


def perturb(hyper, round_, member):
    g = torch.Generator().manual_seed(777 + 50 * round_ + member)
    factors = torch.tensor([0.8, 1.25])[torch.randint(0, 2, (2,), generator=g)].tolist()
    return {"lr": min(0.5, hyper["lr"] * factors[0]), "wd": hyper["wd"] * factors[1]}


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--rounds", type=int, default=6)
    ap.add_argument("--steps", type=int, default=20)
    args = ap.parse_args()
    torch.set_default_dtype(torch.float64)
    world = World()
    x, y = make_moons(900, noise=0.25, random_state=0)
    x, y = torch.tensor(x), torch.tensor(y)
    train, valid, test = (x[:500], y[:500]), (x[500:700], y[500:700]), (x[700:], y[700:])

    hypers = [{"lr": 0.002 * 2.0 ** m, "wd": 10.0 ** (-5 + m % 4)} for m in range(MEMBERS)]
    mine = {m: Member(m, hypers[m]) for m in range(MEMBERS) if world.owner(m) == world.rank}
    size = sum(t.numel() for t in Member(0, hypers[0]).tensors())

    for round_ in range(args.rounds):
        for member in mine.values():
            member.train(*train, round_, args.steps)
        scores = world.table({m: member.score(*valid) for m, member in mine.items()})
        ranking = sorted(range(MEMBERS), key=lambda m: (scores[m], m))
        for good, bad in zip(ranking[:2], ranking[::-1]):
            flat = mine[good].pack() if good in mine else torch.empty(size)
            world.publish(flat, world.owner(good))
            hypers[bad] = perturb(copy.copy(hypers[good]), round_, bad)
            if bad in mine:
                mine[bad].unpack(flat)
                mine[bad].use(hypers[bad])
        if world.rank == 0:
            print(f"round {round_} best {ranking[0]} {scores[ranking[0]]:.10f} worst {scores[ranking[-1]]:.10f}")

    scores = world.table({m: member.score(*valid) for m, member in mine.items()})
    best = min(range(MEMBERS), key=lambda m: (scores[m], m))
    flat = world.publish(mine[best].pack() if best in mine else torch.empty(size), world.owner(best))
    if world.rank == 0:
        final = Member(best, hypers[best])
        final.unpack(flat)
        print(f"test {final.score(*test):.10f} lr {hypers[best]['lr']:.6f} wd {hypers[best]['wd']:.8f} |w| {flat.norm():.8f}")
    world.close()


if __name__ == "__main__":
    main()
