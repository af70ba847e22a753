"""Regression on a synthetic price table; the optimizer state is divided among the processes."""
import argparse
import math
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters


def price_table(n, seed):
    rng = np.random.default_rng(seed)
    area = rng.gamma(4.0, 22.0, n)
    rooms = rng.integers(1, 7, n)
    age = rng.uniform(0, 90, n)
    floor = rng.integers(0, 12, n)
    dist_km = rng.exponential(6.0, n)
    zone = rng.integers(0, 8, n)
    price = 3.1 * area + 14 * rooms - 0.6 * age + 25 * np.cos(zone) - 4 * np.sqrt(dist_km) + 8 * rng.standard_t(3, n)
    num = np.stack([area, rooms, age, floor, dist_km], 1)
    num = (num - num.mean(0)) / num.std(0)
    x = np.concatenate([num, np.eye(8)[zone]], 1)
    return torch.tensor(x, dtype=torch.float32), torch.tensor((price - price.mean()) / price.std(), dtype=torch.float32)


class ShardedAdam:
    """Adam whose moments live on the process that owns the slice of the flat parameter vector."""

    def __init__(self, module, lr, betas=(0.9, 0.98), eps=1e-6, max_norm=None):
        self.params = list(module.parameters())
        self.world, self.rank = dist.get_world_size(), dist.get_rank()
        self.numel = sum(p.numel() for p in self.params)
        self.size = math.ceil(self.numel / self.world)
        self.lr, self.betas, self.eps, self.max_norm = lr, betas, eps, max_norm
        self.master = self._flat([p.detach() for p in self.params]).chunk(self.world)[self.rank].clone()
        self.m = torch.zeros(self.size)
        self.v = torch.zeros(self.size)
        self.t = 0

    def _flat(self, tensors):
        flat = torch.zeros(self.size * self.world)
        flat[: self.numel] = torch.cat([t.reshape(-1) for t in tensors])
        return flat

    def _clip(self, grad):
        total = grad.square().sum()
        dist.all_reduce(total)
        norm = total.sqrt()
        grad.mul_(min(1.0, self.max_norm / (norm.item() + 1e-6)))
        return norm

    @torch.no_grad()
    def step(self):
        flat = self._flat([p.grad for p in self.params])
        grad = torch.empty(self.size)
        dist.reduce_scatter_tensor(grad, flat)
        grad /= self.world
        if self.max_norm is not None:
            self._clip(grad)
        self.t += 1
        b1, b2 = self.betas
        self.m.lerp_(grad, 1 - b1)
        self.v.lerp_(grad.square(), 1 - b2)
        denom = (self.v / (1 - b2 ** self.t)).sqrt().add_(self.eps)
        self.master.addcdiv_(self.m / (1 - b1 ** self.t), denom, value=-self.lr)
        full = torch.empty(self.size * self.world)
        dist.all_gather_into_tensor(full, self.master)
        vector_to_parameters(full[: self.numel], self.params)

    def zero_grad(self):
        for p in self.params:
            p.grad = None


def make_net():
    return nn.Sequential(nn.Linear(13, 48), nn.SiLU(), nn.Linear(48, 48), nn.SiLU(), nn.Linear(48, 1))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=50)
    ap.add_argument("--batch", type=int, default=128)
    ap.add_argument("--max-norm", type=float, default=0.4)
    ap.add_argument("--lr", type=float, default=4e-3)
    a = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    x, y = price_table(4096, seed=8)
    torch.manual_seed(8)
    net = make_net()
    opt = ShardedAdam(net, a.lr, max_norm=a.max_norm)
    gen = torch.Generator().manual_seed(80)
    for step in range(a.steps):
        rows = torch.randint(0, 3584, (a.batch,), generator=gen)[rank::world]
        loss = nn.functional.mse_loss(net(x[rows]).squeeze(1), y[rows])
        loss.backward()
        opt.step()
        opt.zero_grad()
        if rank == 0 and step % 10 == 0:
            print(f"step {step} mse {loss.item():.4f}")
    with torch.no_grad():
        mse = nn.functional.mse_loss(net(x[3584:]).squeeze(1), y[3584:])
    if rank == 0:
        size = parameters_to_vector(net.parameters()).numel()
        print(f"{size} parameters, held-out mse {mse.item():.4f}")
    dist.barrier()
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
