"""Optimizer state divided over the ranks: a parameter is updated by its owner only and sent out afterwards."""
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn


class OwnedAdam:
    def __init__(self, params, lr=2e-3, betas=(0.9, 0.99), eps=1e-5):
        self.params = list(params)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        load = [0] * self.world
        self.owner = []
        for p in self.params:
            r = min(range(self.world), key=lambda k: load[k])
            load[r] += p.numel()
            self.owner.append(r)
        own = [p for p, r in zip(self.params, self.owner) if r == self.rank]
        self.inner = torch.optim.Adam(own, lr=lr, betas=betas, eps=eps)

    def reduce(self):
        for p, r in zip(self.params, self.owner):
            dist.reduce(p.grad, dst=r)
            if r == self.rank:
                p.grad /= self.world
            else:
                p.grad = None

    def step(self):
        self.reduce()
        self.inner.step()
        work = [dist.broadcast(p.data, src=r, async_op=True) for p, r in zip(self.params, self.owner)]
        for w in work:
            w.wait()

    def zero_grad(self):
        for p in self.params:
            p.grad = None


class Highway(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.value, self.gate = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x):
        t = torch.sigmoid(self.gate(x) - 1)
        return t * torch.relu(self.value(x)) + (1 - t) * x


def loader(n, batch, epochs, rank, world):
    for epoch in range(epochs):
        order = torch.randperm(n, generator=torch.Generator().manual_seed(300 + epoch))
        for rows in order.split(batch):
            yield epoch, rows.chunk(world)[rank]


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    d = load_digits()
    x, y = torch.tensor(d.data / 16, dtype=torch.float32), torch.tensor(d.target)
    torch.manual_seed(42)
    model = nn.Sequential(nn.Linear(64, 40), Highway(40), Highway(40), nn.Linear(40, 10))
    opt = OwnedAdam(model.parameters())
    last = -1
    for epoch, rows in loader(1440, 120, 4, rank, world):
        if epoch != last and rank == 0:
            with torch.no_grad():
                hits = (model(x[1440:]).argmax(1) == y[1440:]).float().mean().item()
            print(f"before epoch {epoch}: {hits:.4f}")
        last = epoch
        opt.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        opt.step()
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
