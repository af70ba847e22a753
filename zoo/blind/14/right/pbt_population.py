"""Population-based training: four networks, each with a learning rate of its own.

Members are dealt out to the processes and trained without any exchange. After each
generation the worst member takes over weights, momentum and (changed) settings of the
best one, wherever that lies. Regression on the diabetes data.
"""
import os

import numpy as np
import torch
import torch.distributed as dist
from sklearn.datasets import load_diabetes
from torch import nn

MEMBERS, GENERATIONS, STEPS, BATCH = 4, 4, 5, 48


class Member:
    def __init__(self, number):
        torch.manual_seed(1000 + number)
        self.number, self.taken = number, 0
        self.net = nn.Sequential(nn.Linear(10, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1))
        rng = np.random.default_rng([5, number])
        self.settings = {"lr": float(10 ** rng.uniform(-2.5, -0.8)), "decay": float(10 ** rng.uniform(-4, -2))}
        self.renew()

    def renew(self):
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=self.settings["lr"], momentum=0.9,
                                         weight_decay=self.settings["decay"])

    def train(self, x, y, steps):
        for _ in range(steps):
            rows = np.random.default_rng([6, self.number, self.taken]).choice(len(x), BATCH, replace=False)
            loss = nn.functional.mse_loss(self.net(x[rows])[:, 0], y[rows])
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.taken += 1

    @torch.no_grad()
    def score(self, x, y):
        return nn.functional.mse_loss(self.net(x)[:, 0], y).item()

    def pack(self):
        momenta = [self.optimizer.state[p]["momentum_buffer"] for p in self.net.parameters()]
        return torch.cat([t.detach().flatten() for t in [*self.net.parameters(), *momenta]])

    @torch.no_grad()
    def unpack(self, flat):
        params = list(self.net.parameters())
        pieces = flat.split([p.numel() for p in params] * 2)
        self.renew()
        for p, weights, momentum in zip(params, pieces, pieces[len(params):]):
            p.copy_(weights.view_as(p))
            self.optimizer.state[p]["momentum_buffer"] = momentum.view_as(p).clone()


class Population:
    def __init__(self, rank, world):
        self.rank, self.world = rank, world
        self.members = {m: Member(m) for m in range(MEMBERS) if self.home(m) == rank}
        self.size = 2 * sum(p.numel() for p in next(iter(self.members.values())).net.parameters())

    def home(self, member):
        return member % self.world

    def everybody(self, own):
        if self.world == 1:
            return own
        parts = [None] * self.world
        dist.all_gather_object(parts, own)
        return {k: v for part in parts for k, v in part.items()}

    def exploit(self, generation, scores, settings):
        """The worst takes over the best."""
        ranking = sorted(scores, key=scores.get)
        best, worst = ranking[0], ranking[-1]
        source = self.members.get(best)
        flat = source.pack() if source else torch.empty(self.size)
        if self.world > 1:
            dist.broadcast(flat, src=self.home(best))
        if worst in self.members:
            rng = np.random.default_rng([7, generation, worst])
            loser = self.members[worst]
            loser.settings = {k: float(v * rng.choice([0.8, 1.25])) for k, v in settings[best].items()}
            loser.unpack(flat)
        return best, worst


def main():
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    assert MEMBERS % world == 0
    if world > 1:
        dist.init_process_group("gloo")
    x, y = load_diabetes(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    x = torch.tensor(x[order] / x.std(), dtype=torch.float32)
    y = torch.tensor((y[order] - y.mean()) / y.std(), dtype=torch.float32)
    train, valid, test = (x[:300], y[:300]), (x[300:370], y[300:370]), (x[370:], y[370:])

    population = Population(rank, world)
    for generation in range(GENERATIONS):
        for member in population.members.values():
            member.train(*train, STEPS)
        scores = population.everybody({m: p.score(*valid) for m, p in population.members.items()})
        settings = population.everybody({m: p.settings for m, p in population.members.items()})
        best, worst = population.exploit(generation, scores, settings)
        if rank == 0:
            listed = ", ".join(f"{scores[m]:.4f} (rate {settings[m]['lr']:.4f})" for m in range(MEMBERS))
            print(f"generation {generation}: {listed}; {worst} becomes {best}")
    final = population.everybody({m: p.score(*test) for m, p in population.members.items()})
    if rank == 0:
        print("test: " + ", ".join(f"{final[m]:.4f}" for m in range(MEMBERS)))
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
