"""Supervised loss plus consistency between two noisy views; the second view goes through the bare module."""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP


def env():
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "30085")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
        self.cls = nn.Linear(64, 10)

    def forward(self, x):
        return self.cls(self.trunk(x))


def main():
    env()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    d = load_digits()
    x, y = torch.tensor(d.data, dtype=torch.float32) / 16, torch.tensor(d.target)
    torch.manual_seed(30)
    model = DDP(Net())
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    gen = torch.Generator().manual_seed(31)

    for step in range(100):
        rows = torch.randint(1500, (64,), generator=gen)
        noise = 0.2 * torch.randn(2, 64, 64, generator=gen)
        rows, noise = rows[rank::world], noise[:, rank::world]
        out = model(x[rows] + noise[0])
        other = model.module(x[rows] + noise[1])
        loss = F.cross_entropy(out, y[rows])
        loss = loss + F.kl_div(other.log_softmax(1), out.softmax(1), reduction="batchmean")
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 25 == 24:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            with torch.no_grad():
                test = F.cross_entropy(model.module(x[1500:]), y[1500:]).item()
            if rank == 0:
                print(f"step {step + 1} train {mean.item() / world:.5f} test {test:.5f}")

    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
