"""Residual network cut into stages, one per process; micro-batches travel with send and recv."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_wine

torch.set_default_dtype(torch.float64)

WIDTH, DEPTH = 24, 8
BATCH, MICRO, STEPS = 48, 4, 30


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


class Stage(nn.Module):
    def __init__(self, layers, rank, world):
        super().__init__()
        self.layers = nn.Sequential(*layers)
        self.rank, self.world = rank, world
        self.inbox = torch.empty(BATCH // MICRO, WIDTH)
        self.grad_inbox = torch.empty(BATCH // MICRO, WIDTH)

    @property
    def first(self):
        return self.rank == 0

    @property
    def last(self):
        return self.rank == self.world - 1

    def receive(self):
        dist.recv(self.inbox, src=self.rank - 1)
        return self.inbox.detach().requires_grad_()

    def run_step(self, x, y):
        inputs, outputs, total = [], [], torch.zeros(())
        for part, target in zip(x.chunk(MICRO), y.chunk(MICRO)):
            inp = part if self.first else self.receive()
            out = self.layers(inp)
            if self.last:
                out = F.cross_entropy(out, target) / MICRO
                total += out.detach()
            else:
                dist.send(out.detach(), dst=self.rank + 1)
            inputs.append(inp)
            outputs.append(out)
        for inp, out in zip(inputs, outputs):
            if self.last:
                out.backward()
            else:
                dist.recv(self.grad_inbox, src=self.rank + 1)
                out.backward(self.grad_inbox)
            if not self.first:
                dist.send(inp.grad, dst=self.rank - 1)
        return total


def build_stage(rank, world):
    torch.manual_seed(40)
    layers = [nn.Linear(13, WIDTH)] + [Block() for _ in range(DEPTH)]
    head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3))
    per_stage = DEPTH // world
    own = layers[1 + rank * per_stage:1 + (rank + 1) * per_stage]
    if rank == 0:
        own = layers[:1] + own
    if rank == world - 1:
        own = own + [head]
    return Stage(own, rank, world)


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()

    wine = load_wine()
    x = torch.tensor(wine.data)
    x = (x - x.mean(0)) / x.std(0)
    y = torch.tensor(wine.target)

    stage = build_stage(rank, world)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.03, momentum=0.9)
    pick = torch.Generator().manual_seed(3)

    for step in range(STEPS):
        rows = torch.randint(0, len(x), (BATCH,), generator=pick)
        optimizer.zero_grad()
        loss = stage.run_step(x[rows], y[rows])
        optimizer.step()
        dist.broadcast(loss, src=world - 1)
        if rank == 0 and step % 5 == 4:
            print(f"step {step + 1:3d} loss {loss.item():.8f}")

    total = sum(p.detach().abs().sum() for p in stage.parameters())
    dist.all_reduce(total)
    if rank == 0:
        print(f"sum of |weights| {total.item():.8f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
