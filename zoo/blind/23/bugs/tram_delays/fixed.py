"""Delay of the next tram from stop, hour and the last four delays (embedding + MLP).

The batch of a step is worked off in three rounds to keep the memory low. Gradients are
summed over the processes by hooks while the backward pass is still running.
"""
import math
import os
import time

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

STOPS = 30


class DelayNet(nn.Module):
    def __init__(self, width=40):
        super().__init__()
        self.stop = nn.Embedding(STOPS, 8)
        self.body = nn.Sequential(
            nn.Linear(8 + 2 + 4, width), nn.GELU(),
            nn.Linear(width, width), nn.GELU(),
            nn.Linear(width, 1))

    def forward(self, stop, numbers):
        return self.body(torch.cat([self.stop(stop), numbers], dim=1)).squeeze(1)


def timetable(count, seed=11):
    rng = np.random.default_rng(seed)
    stop = rng.integers(STOPS, size=count)
    hour = rng.uniform(5, 24, size=count)
    past = rng.gamma(1.2, 1.0, size=(count, 4))
    rush = np.exp(-((hour - 8) / 1.5) ** 2) + np.exp(-((hour - 17) / 2) ** 2)
    delay = 0.5 * past[:, 0] + 0.2 * past[:, 1] + rush * (1 + np.sin(stop)) + 0.1 * rng.normal(size=count)
    clock = np.stack([np.sin(hour / 24 * 2 * math.pi), np.cos(hour / 24 * 2 * math.pi)], axis=1)
    numbers = np.concatenate([clock, past], axis=1)
    return (torch.from_numpy(stop), torch.tensor(numbers, dtype=torch.float32),
            torch.tensor(delay, dtype=torch.float32))


class Trainer:
    def __init__(self, rank, world, batch=48, rounds=3, lr=3e-3):
        self.rank, self.world = rank, world
        self.batch, self.rounds = batch, rounds
        torch.manual_seed(40)
        self.net = DelayNet()
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=lr, weight_decay=0.01)
        self.round = 0
        for p in self.net.parameters():
            p.register_post_accumulate_grad_hook(self.collect)

    def collect(self, p):
        # losses are divided by the whole batch, so gradients add up
        if self.round == self.rounds - 1:
            dist.all_reduce(p.grad)

    def rows(self, step, k):
        size = self.batch // self.rounds
        first = step * self.batch + k * size
        return torch.arange(first, first + size)[self.rank::self.world]

    def step(self, step, data):
        stop, numbers, delay = data
        total = torch.zeros(())
        for self.round in range(self.rounds):
            rows = self.rows(step, self.round)
            error = self.net(stop[rows], numbers[rows]) - delay[rows]
            loss = error.pow(2).sum() / self.batch
            loss.backward()
            total += loss.detach()
        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.all_reduce(total)
        return total.item()


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.set_num_threads(1)
    trainer = Trainer(dist.get_rank(), dist.get_world_size())
    steps = 40
    data = timetable(trainer.batch * steps)

    for step in range(steps):
        loss = trainer.step(step, data)
        if trainer.rank == 0 and (step + 1) % 10 == 0:
            print(f"[{step + 1:3d}/{steps}] squared error {loss:.4f}", flush=True)

    stop, numbers, delay = timetable(800, seed=12)
    with torch.no_grad():
        rmse = (trainer.net(stop, numbers) - delay).pow(2).mean().sqrt().item()
    if trainer.rank == 0:
        print(f"test rmse {rmse:.4f} minutes", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
