"""Layers spread over the processes like beads on a string; activations and their gradients travel by send / recv."""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import make_moons

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "30581")

WIDTH, BATCH, MICRO, STEPS = 24, 64, 4, 60


def layers():
    """All the layers are made everywhere, in the same order, and each process keeps its part."""
    torch.manual_seed(33)
    mid = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)]
    return [nn.Sequential(nn.Linear(2, WIDTH), nn.Tanh()), *mid, nn.Linear(WIDTH, 2)]


class Stage:
    def __init__(self):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        per = 4 // self.world
        self.net = nn.Sequential(*layers()[self.rank * per:(self.rank + 1) * per])
        self.first, self.last = self.rank == 0, self.rank == self.world - 1
        self.opt = torch.optim.Adam(self.net.parameters(), lr=5e-3)

    def forward(self, x):
        if not self.first:
            x = torch.empty(len(x), WIDTH)
            dist.recv(x, self.rank - 1)
            x.requires_grad_(torch.is_grad_enabled())
        out = self.net(x)
        if not self.last:
            dist.send(out.detach(), self.rank + 1)
        return x, out

    def backward(self, x, out, target):
        loss = torch.zeros(())
        if self.last:
            loss = F.cross_entropy(out, target) / MICRO
            loss.backward()
        else:
            grad = torch.empty_like(out)
            dist.recv(grad, self.rank + 1)
            out.backward(grad)
        if not self.first:
            dist.send(x.grad, self.rank - 1)
        return loss.detach()

    def step(self, x, y):
        self.opt.zero_grad()
        kept = [self.forward(part) for part in x.chunk(MICRO)]
        total = sum(self.backward(a, b, t) for (a, b), t in zip(kept, y.chunk(MICRO)))
        self.opt.step()
        return total


def main():
    dist.init_process_group("gloo")
    stage = Stage()
    x, y = make_moons(1024, noise=0.2, random_state=0)
    x, y = torch.tensor(x, dtype=torch.float32), torch.tensor(y)
    gen = torch.Generator().manual_seed(34)
    for step in range(STEPS):
        rows = torch.randint(len(x), (BATCH,), generator=gen)
        loss = stage.step(x[rows], y[rows])
        if step % 15 == 14:
            dist.broadcast(loss, stage.world - 1)
            if stage.rank == 0:
                print(f"step {step + 1} loss {loss.item():.5f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
