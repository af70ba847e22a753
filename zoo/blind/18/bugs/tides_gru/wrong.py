"""Forecast a sum of tides with an LSTM. Gradients are averaged in one flat vector and clipped."""
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters

WINDOW, AHEAD, BATCH = 24, 4, 32


class Forecaster(nn.Module):
    def __init__(self, hidden=20):
        super().__init__()
        self.rnn = nn.LSTM(2, hidden, batch_first=True)
        self.read = nn.Linear(hidden, AHEAD)

    def forward(self, x):
        _, (h, _) = self.rnn(x)
        return self.read(h[-1])


class Averager:
    """Running average of the weights, used for the forecasts."""

    def __init__(self, model, keep=0.9):
        self.keep = keep
        self.shadow = parameters_to_vector(model.parameters()).detach().clone()

    def update(self, model):
        now = parameters_to_vector(model.parameters()).detach()
        self.shadow.mul_(self.keep).add_(now, alpha=1 - self.keep)

    def copy_to(self, model):
        vector_to_parameters(self.shadow.clone(), model.parameters())


def tides(hours, seed):
    gen = torch.Generator().manual_seed(seed)
    t = torch.arange(hours)
    level = torch.zeros(hours)
    for period, height in ((12.42, 1.0), (12.0, 0.4), (25.82, 0.3), (327.8, 0.5)):
        level += height * torch.cos(2 * math.pi * (t / period + torch.rand((), generator=gen)))
    storm = (torch.rand(hours, generator=gen) < 0.02) * torch.randn(hours, generator=gen) * 3
    wind = 0.1 * torch.randn(hours, generator=gen)
    return torch.stack([level + storm, wind], 1), level


def windows(series, level, starts):
    x = torch.stack([series[s:s + WINDOW] for s in starts.tolist()])
    y = torch.stack([level[s + WINDOW:s + WINDOW + AHEAD] for s in starts.tolist()])
    return x, y


def average_gradients(model, world):
    if world == 1:
        return
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    dist.all_reduce(flat)
    flat /= world
    at = 0
    for p in model.parameters():
        p.grad.copy_(flat[at:at + p.numel()].view_as(p))
        at += p.numel()


def main():
    torch.set_default_dtype(torch.float64)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(6)
    model, mirror = Forecaster(), Forecaster()
    average = Averager(model)
    opt = torch.optim.RMSprop(model.parameters(), lr=2e-3, momentum=0.5)
    series, level = tides(3000, seed=14)
    test_series, test_level = tides(400, seed=15)
    test_x, test_y = windows(test_series, test_level, torch.arange(0, 360, 5))
    pick = torch.Generator().manual_seed(16)
    for step in range(60):
        starts = torch.randint(3000 - WINDOW - AHEAD, (BATCH,), generator=pick)
        x, y = windows(series, level, starts[rank * BATCH // world:(rank + 1) * BATCH // world])
        loss = (model(x) - y).pow(2).mean()
        model.zero_grad()
        loss.backward()
        clip_grad_norm_(model.parameters(), 0.25)
        average_gradients(model, world)
        opt.step()
        average.update(model)
        if step % 20 == 19:
            average.copy_to(mirror)
            with torch.no_grad():
                error = (mirror(test_x) - test_y).pow(2).mean().sqrt().item()
            if rank == 0:
                print(f"step {step + 1}: rms error of the averaged weights {error:.9f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
