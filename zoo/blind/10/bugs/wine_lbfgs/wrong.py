"""Softmax regression with a hidden layer on wine, L-BFGS over the whole set, rows split over processes."""
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_wine
from sklearn.preprocessing import scale

torch.set_default_dtype(torch.float64)


def env():
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29718")


class Problem:
    def __init__(self, rank, world):
        x, y = load_wine(return_X_y=True)
        self.total = len(x)
        self.x = torch.tensor(scale(x))[rank::world]
        self.y = torch.tensor(y)[rank::world]
        torch.manual_seed(2)
        self.net = torch.nn.Sequential(torch.nn.Linear(13, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3))
        self.opt = torch.optim.LBFGS(self.net.parameters(), lr=1.0, max_iter=2, history_size=6,
                                     line_search_fn="strong_wolfe")
        self.world = world
        self.calls = 0

    def closure(self):
        self.calls += 1
        self.opt.zero_grad()
        data = F.cross_entropy(self.net(self.x), self.y, reduction="sum") / self.total
        penalty = sum(p.square().sum() for p in self.net.parameters()) * 5e-3
        loss = data + penalty / self.world
        loss.backward()
        for p in self.net.parameters():
            dist.all_reduce(p.grad)
        return loss

    @torch.no_grad()
    def value(self):
        data = F.cross_entropy(self.net(self.x), self.y, reduction="sum") / self.total
        dist.all_reduce(data)
        return data.item()


def main():
    env()
    dist.init_process_group("gloo", timeout=timedelta(seconds=8))
    rank, world = dist.get_rank(), dist.get_world_size()
    problem = Problem(rank, world)
    for step in range(1, 41):
        problem.opt.step(problem.closure)
        if step % 10 == 0:
            value = problem.value()
            if rank == 0:
                print(f"step {step}: {value:.8f} after {problem.calls} calls", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
