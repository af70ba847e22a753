"""Iris and friends: replicas that are averaged after each step."""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_iris, load_wine
from sklearn.preprocessing import StandardScaler


class Replica:
    def __init__(self, inputs, classes, lr):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.net = nn.Sequential(nn.Linear(inputs, 24), nn.Tanh(), nn.Linear(24, classes))
        for p in self.net.parameters():
            dist.broadcast(p.data, 0)
        self.opt = torch.optim.Adam(self.net.parameters(), lr=lr)

    @torch.no_grad()
    def average(self, tensors):
        for t in tensors:
            dist.all_reduce(t)
            t.div_(self.world)

    def step(self, x, y):
        loss = F.cross_entropy(self.net(x), y)
        self.opt.zero_grad()
        loss.backward()
        self.average([p.grad for p in self.net.parameters()])
        self.opt.step()
        return loss.detach()


def train(name, bunch, lr, steps, batch):
    x = torch.tensor(StandardScaler().fit_transform(bunch.data), dtype=torch.float32)
    y = torch.tensor(bunch.target)
    torch.manual_seed(len(name))
    replica = Replica(x.shape[1], 3, lr)
    gen = torch.Generator().manual_seed(77)
    for step in range(steps):
        rows = torch.randperm(len(x), generator=gen)[:batch]
        rows = rows[replica.rank::replica.world]
        loss = replica.step(x[rows], y[rows])
        if step % 20 == 19:
            replica.average([loss])
            if replica.rank == 0:
                print(f"{name} step {step + 1} loss {loss.item():.5f}")
    with torch.no_grad():
        final = F.cross_entropy(replica.net(x), y).item()
    if replica.rank == 0:
        print(f"{name} final loss {final:.6f}")


def main():
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "30455")
    dist.init_process_group("gloo")
    train("iris", load_iris(), lr=0.02, steps=60, batch=24)
    train("wine", load_wine(), lr=0.02, steps=60, batch=32)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
