"""Hourly price of power from load, wind and fuel; some prices in the record are misprints.

Steps whose loss is far above the usual are left out, as in the training of large models, so
that a batch with gross misprints cannot throw the weights off.
"""
import logging
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

log = logging.getLogger("tariffs")


def prices(n, seed, misprints=0.0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 10, generator=g)
    y = 1.2 * x[:, 0] - 0.8 * x[:, 1] * (x[:, 2] > 0) + 0.5 * torch.sin(2 * x[:, 3]) + 0.3 * x[:, 4] * x[:, 5]
    y = y + 0.2 * torch.randn(n, generator=g)
    bad = torch.rand(n, generator=g) < misprints
    y = torch.where(bad, y + 12 * torch.randn(n, generator=g), y)
    return TensorDataset(x, y)


class SpikeGuard:
    """Keeps a running mean of the loss; a loss above `factor` times it is a spike."""

    def __init__(self, factor=2.5, memory=0.9):
        self.factor, self.memory = factor, memory
        self.mean, self.skipped = None, 0

    def is_spike(self, loss):
        value = loss.detach().clone()
        if self.mean is None:
            self.mean = value
        if value > self.factor * self.mean:
            self.skipped += 1
            return True
        self.mean = self.memory * self.mean + (1 - self.memory) * value
        return False


class Trainer:
    def __init__(self, rank, world):
        self.rank, self.world = rank, world
        torch.manual_seed(10)
        self.net = DDP(nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1)))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.03, momentum=0.9)
        self.guard = SpikeGuard()

    def step(self, x, y):
        loss = nn.functional.mse_loss(self.net(x).squeeze(1), y)
        self.optimizer.zero_grad()
        loss.backward()
        if not self.guard.is_spike(loss):
            self.optimizer.step()
        return loss.detach()

    @torch.no_grad()
    def validate(self, data):
        x, y = data.tensors
        return nn.functional.mse_loss(self.net.module(x).squeeze(1), y).item()

    def fit(self, loader, sampler, valid, epochs):
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            total = torch.zeros(1)
            for x, y in loader:
                total += self.step(x, y)
            dist.all_reduce(total)
            error = self.validate(valid)
            if self.rank == 0:
                log.info("epoch %d train %.4f validation %.4f skipped %d",
                         epoch, total.item() / self.world / len(loader), error, self.guard.skipped)


def main():
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s")
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29620")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    train, valid = prices(480, seed=1, misprints=0.012), prices(200, seed=2)
    sampler = DistributedSampler(train, seed=9)
    loader = DataLoader(train, batch_size=48 // world, sampler=sampler)
    Trainer(rank, world).fit(loader, sampler, valid, epochs=5)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
