"""Adam by hand; every process keeps the moments of the parameters that it owns and sends out their new values."""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_breast_cancer
from sklearn.preprocessing import StandardScaler


class OwnerAdam:
    def __init__(self, params, lr, betas=(0.9, 0.99), eps=1e-8, limit=1.0):
        self.params = list(params)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.lr, self.betas, self.eps, self.limit, self.t = lr, betas, eps, limit, 0
        self.state = {
            i: (torch.zeros_like(p), torch.zeros_like(p)) for i, p in enumerate(self.params) if self.owner(i) == self.rank
        }

    def owner(self, i):
        return i % self.world

    @torch.no_grad()
    def step(self):
        self.t += 1
        squares = torch.zeros(())
        for i, p in enumerate(self.params):
            # only the owner needs the sum
            dist.reduce(p.grad, dst=self.owner(i))
            if i in self.state:
                p.grad /= self.world
                squares += p.grad.square().sum()
        dist.all_reduce(squares)
        shrink = min(1.0, self.limit / (squares.sqrt().item() + 1e-6))
        b1, b2 = self.betas
        for i, (m, v) in self.state.items():
            p = self.params[i]
            g = p.grad * shrink
            m.mul_(b1).add_(g, alpha=1 - b1)
            v.mul_(b2).addcmul_(g, g, value=1 - b2)
            top = m / (1 - b1 ** self.t)
            p.sub_(self.lr * top / ((v / (1 - b2 ** self.t)).sqrt() + self.eps))
        for i, p in enumerate(self.params):
            dist.broadcast(p.data, src=self.owner(i))
            p.grad = None


def main():
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29772")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    b = load_breast_cancer()
    x = torch.tensor(StandardScaler().fit_transform(b.data), dtype=torch.float32)
    y = torch.tensor(b.target)
    torch.manual_seed(44)
    net = nn.Sequential(nn.Linear(30, 24), nn.Tanh(), nn.Linear(24, 12), nn.Tanh(), nn.Linear(12, 2))
    opt = OwnerAdam(net.parameters(), lr=4e-3)
    gen = torch.Generator().manual_seed(45)
    for step in range(100):
        rows = torch.randperm(480, generator=gen)[:32][rank::world]
        F.cross_entropy(net(x[rows]), y[rows]).backward()
        opt.step()
        if step % 20 == 19:
            with torch.no_grad():
                test = F.cross_entropy(net(x[480:]), y[480:]).item()
                size = sum(p.square().sum() for p in net.parameters()).sqrt().item()
            if rank == 0:
                print(f"step {step + 1} test {test:.5f} size of weights {size:.5f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
