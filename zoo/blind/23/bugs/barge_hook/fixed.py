"""Will a barge be late? Classification of two weeks of river gauge readings (GRU).

A few gauges report wild values, so gradients are limited in norm. The limit lives in the
communication hook of DDP, where the gradients are at hand as one flat bucket.
"""
import os
import time
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel


@dataclass
class Settings:
    days: int = 14
    gauges: int = 4
    hidden: int = 24
    batch: int = 32
    steps: int = 45
    lr: float = 0.15
    max_norm: float = 0.25
    seed: int = 3


class LateNet(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.gru = nn.GRU(s.gauges, s.hidden, batch_first=True)
        self.out = nn.Linear(s.hidden, 2)

    def forward(self, x):
        _, last = self.gru(x)
        return self.out(last[0])


class BucketLimit:
    """State of the hook: number of processes and the largest allowed norm."""

    def __init__(self, world, max_norm):
        self.world = world
        self.max_norm = max_norm

    def limit(self, flat):
        norm = flat.norm()
        return flat.mul_(torch.clamp(self.max_norm / (norm + 1e-6), max=1.0))


def limited_mean(state, bucket):
    flat = bucket.buffer().div_(state.world)
    work = dist.all_reduce(flat, async_op=True).get_future()
    return work.then(lambda done: state.limit(done.value()[0]))


def voyages(s, count, seed):
    rng = np.random.default_rng(seed)
    level = np.cumsum(rng.normal(scale=0.4, size=(count, s.days, s.gauges)), axis=1)
    low_water = level[:, -5:, :2].mean(axis=(1, 2)) - 0.5 * level[:, :5, 2].mean(axis=1)
    late = (low_water + 0.2 * rng.normal(size=count) < 0).astype(np.int64)
    wild = rng.random((count, 1, 1)) < 0.08
    level = np.where(wild, level * 6.0, level)
    return torch.tensor(level, dtype=torch.float32), torch.from_numpy(late)


def accuracy(net, s):
    x, y = voyages(s, 600, seed=1000)
    with torch.no_grad():
        logits = net(x)
    return (logits.argmax(1) == y).float().mean().item(), F.cross_entropy(logits, y).item()


def train(s, rank, world):
    torch.manual_seed(s.seed)
    net = LateNet(s)
    ddp = DistributedDataParallel(net)
    ddp.register_comm_hook(BucketLimit(world, s.max_norm), limited_mean)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=s.lr, momentum=0.9)
    x, y = voyages(s, s.batch * s.steps, seed=s.seed)
    share = s.batch // world

    for step in range(s.steps):
        begin = step * s.batch + rank * share
        rows = slice(begin, begin + share)
        loss = F.cross_entropy(ddp(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 9 == 0:
            total = loss.detach().clone()
            dist.all_reduce(total)
            if rank == 0:
                print(f"step {step:2d}: loss {total.item() / world:.4f}", flush=True)
    return net


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    s = Settings()
    net = train(s, dist.get_rank(), dist.get_world_size())
    if dist.get_rank() == 0:
        right, loss = accuracy(net, s)
        print(f"held-out voyages: accuracy {right:.3f}, loss {loss:.4f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
