"""Implicit quantile regression on the diabetes table: progression at any quantile.

The net gets a patient and a quantile level tau and answers the value at that level; for
each patient eight fresh levels are drawn in each step. Sharded with FSDP2.
"""
import math
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_diabetes
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

LEVELS = 8
BATCH = 40
EPOCHS = 4


class QuantileNet(nn.Module):
    def __init__(self, features=10, width=32, waves=12):
        super().__init__()
        self.patient = nn.Linear(features, width)
        self.level = nn.Linear(waves, width)
        self.joint = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))
        self.register_buffer("waves", math.pi * torch.arange(1, waves + 1).float())

    def forward(self, x, tau):
        who = torch.tanh(self.patient(x)).unsqueeze(1)
        where = torch.cos(tau.unsqueeze(-1) * self.waves)
        return self.joint(who * torch.tanh(self.level(where))).sum(dim=-1)


def pinball(answer, target, tau):
    gap = target.unsqueeze(1) - answer
    return torch.maximum(tau * gap, (tau - 1) * gap).mean()


class LevelSource:
    """Quantile levels for the patients of one step."""

    def __init__(self, seed, rank, world):
        self.generator = torch.Generator().manual_seed(seed)
        self.rank, self.world = rank, world

    def draw(self, patients):
        return torch.rand(patients, LEVELS, generator=self.generator)


def load(seed):
    table = load_diabetes()
    x = torch.tensor(table.data, dtype=torch.float32) * 20
    y = torch.tensor(table.target, dtype=torch.float32)
    y = (y - y.mean()) / y.std()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    return (x[order[:400]], y[order[:400]]), (x[order[400:]], y[order[400:]])


def coverage(model, x, y):
    """Share of patients inside the 10-90 % band, and the mean width of the band."""
    tau = torch.tensor([[0.1, 0.9]]).expand(len(x), 2)
    with torch.no_grad():
        low, high = model(x, tau).unbind(1)
    return ((y > low) & (y < high)).float().mean().item(), (high - low).mean().item()


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)

    torch.manual_seed(0)
    model = QuantileNet()
    mesh = init_device_mesh("cpu", (world,))
    fully_shard(model.patient, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)

    (x, y), (test_x, test_y) = load(seed=14)
    levels = LevelSource(77, rank, world)
    share = BATCH // world
    step = 0
    for epoch in range(EPOCHS):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(100 + epoch))
        for first in range(0, len(order), BATCH):
            rows = order[first:first + BATCH].chunk(world)[rank]
            tau = levels.draw(share)
            loss = pinball(model(x[rows], tau), y[rows], tau)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"epoch {epoch + 1} step {step} pinball {mean.item() / world:.4f}", flush=True)

    inside, width = coverage(model, test_x, test_y)
    if rank == 0:
        print(f"80 % band: covers {inside:.3f}, width {width:.4f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
