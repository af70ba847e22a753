"""Forecasting from an endless sensor stream; the job stops half-way, saves, and goes on from the checkpoint."""
import itertools
import math
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, IterableDataset

WINDOW, CHANNELS = 12, 4
GLOBAL_BATCH, FIRST_RUN, SECOND_RUN = 32, 25, 25


def windows():
    """Non-overlapping windows of a slowly drifting oscillator, always from the beginning."""
    gen = torch.Generator().manual_seed(2024)
    mix = torch.randn(2, CHANNELS, generator=gen)
    x, y, t = 1.0, 0.0, 0
    while True:
        rows = []
        for dx, dy in (0.05 * torch.randn(WINDOW + 1, 2, generator=gen)).tolist():
            angle = 0.35 + 0.25 * t / 20_000
            c, s = math.cos(angle), math.sin(angle)
            x, y = c * x - s * y + dx, s * x + c * y + dy
            radius = max(1.0, math.hypot(x, y))
            x, y, t = x / radius, y / radius, t + 1
            rows.append((x, y))
        block = torch.tensor(rows) @ mix
        yield block[:-1], block[-1]


class SensorStream(IterableDataset):
    def __init__(self, rank, world, start=0):
        self.rank, self.world, self.start = rank, world, start

    def __iter__(self):
        stream = windows()
        stream = itertools.islice(stream, self.start, None)
        return itertools.islice(stream, self.rank, None, self.world)


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(CHANNELS, 24, 3)
        self.out = nn.Linear(24 * (WINDOW - 2), CHANNELS)

    def forward(self, x):
        return self.out(torch.tanh(self.conv(x.transpose(1, 2))).flatten(1))


def train(model, optimizer, seen, steps, rank, world):
    stream = SensorStream(rank, world, start=seen)
    loader = DataLoader(stream, batch_size=GLOBAL_BATCH // world)
    for x, y in itertools.islice(loader, steps):
        loss = F.smooth_l1_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        if world > 1:
            grads = torch.cat([p.grad.flatten() for p in model.parameters()])
            dist.all_reduce(grads)
            for p, g in zip(model.parameters(), grads.split([p.numel() for p in model.parameters()])):
                p.grad.copy_(g.view_as(p) / world)
        optimizer.step()
        seen += GLOBAL_BATCH
        shown = loss.detach().clone()
        if world > 1:
            dist.all_reduce(shown)
    if rank == 0:
        print(f"{seen} windows seen, last loss {shown.item() / world:.10f}")
    return seen


def build():
    torch.manual_seed(12)
    model = Forecaster()
    return model, torch.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.5)


def main():
    torch.set_default_dtype(torch.float64)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    holder = tempfile.TemporaryDirectory() if rank == 0 else None
    where = [holder.name if rank == 0 else None]
    if world > 1:
        dist.broadcast_object_list(where, src=0)
    path = os.path.join(where[0], "checkpoint.pt")

    model, optimizer = build()
    seen = train(model, optimizer, 0, FIRST_RUN, rank, world)
    if rank == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "seen": seen}, path)
    if world > 1:
        dist.barrier()

    model, optimizer = build()
    checkpoint = torch.load(path)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    train(model, optimizer, checkpoint["seen"], SECOND_RUN, rank, world)
    if rank == 0:
        weight = sum(p.detach().pow(2).sum() for p in model.parameters()).sqrt().item()
        print(f"weight norm {weight:.10f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
