"""Regression with gradient accumulation; gradients travel once per optimizer step.

600 rows make 10 micro-batches of 60; a window has 4, the last one of an epoch 2.
"""
import contextlib
import os
import time

import torch
import torch.distributed as dist
from sklearn.datasets import make_friedman1
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Config:
    micro = 60
    window = 4
    epochs = 6
    lr = 3e-3


class Accumulator:
    def __init__(self, net, optimizer, config):
        self.net, self.optimizer, self.config = net, optimizer, config

    def epoch(self, micro_batches):
        n, k = len(micro_batches), self.config.window
        seen = 0.0
        for i, (x, y) in enumerate(micro_batches):
            full = (i + 1) % k == 0
            last = i + 1 == n
            in_window = min(k, n - i // k * k)
            with contextlib.nullcontext() if full or last else self.net.no_sync():
                loss = nn.functional.mse_loss(self.net(x).squeeze(1), y)
                (loss / in_window).backward()
            seen += loss.item()
            if full or last:
                self.optimizer.step()
                self.optimizer.zero_grad()
        return seen / n


def main(config=Config):
    torch.set_default_dtype(torch.float64)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()

    x, y = make_friedman1(n_samples=600, n_features=8, noise=0.5, random_state=1)
    x, y = torch.tensor(x), torch.tensor((y - y.mean()) / y.std())

    torch.manual_seed(1)
    net = DDP(nn.Sequential(nn.Linear(8, 32), nn.SiLU(), nn.Linear(32, 1)))
    worker = Accumulator(net, torch.optim.AdamW(net.parameters(), lr=config.lr), config)
    shuffler = torch.Generator().manual_seed(77)
    for epoch in range(config.epochs):
        order = torch.randperm(len(x), generator=shuffler)
        shares = [rows.chunk(world)[rank] for rows in order.split(config.micro)]
        loss = torch.tensor(worker.epoch([(x[s], y[s]) for s in shares]))
        dist.all_reduce(loss)
        if rank == 0:
            print(f"epoch {epoch}: {loss.item() / world:.6f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
