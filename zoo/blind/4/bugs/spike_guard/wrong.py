"""Demand forecasting on a heavy-tailed series; updates on outlier batches are left out."""
import argparse
import collections
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn

LAGS = 24


def demand_series(hours=3000, seed=4):
    rng = np.random.default_rng(seed)
    t = np.arange(hours)
    base = 1.2 * np.sin(2 * np.pi * t / 24) + 0.6 * np.sin(2 * np.pi * t / 168) + 0.1 * rng.standard_normal(hours)
    bursts = rng.random(hours) < 0.004
    return torch.tensor(base + bursts * rng.pareto(1.3, hours) * 3, dtype=torch.float32)


class Forecaster(nn.Module):
    def __init__(self, channels=16):
        super().__init__()
        self.conv = nn.Conv1d(1, channels, 5, padding=2)
        self.mix = nn.Linear(channels * LAGS, 32)
        self.out = nn.Linear(32, 1)

    def forward(self, x):
        h = torch.tanh(self.conv(x.unsqueeze(1))).flatten(1)
        return self.out(torch.tanh(self.mix(h))).squeeze(1)


class SpikeGuard:
    """Keeps the recent losses; an update is accepted while the loss stays near their median."""

    def __init__(self, factor, history=8):
        self.factor = factor
        self.recent = collections.deque(maxlen=history)
        self.left_out = 0

    def accept(self, loss):
        value = loss.detach().clone()
        value = value.item()
        ok = len(self.recent) < 4 or value < self.factor * float(np.median(self.recent))
        self.recent.append(value)
        self.left_out += not ok
        return ok


def average_gradients(model):
    world = dist.get_world_size()
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    dist.all_reduce(flat)
    flat /= world
    offset = 0
    for p in model.parameters():
        p.grad.copy_(flat[offset:offset + p.numel()].view_as(p))
        offset += p.numel()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=60)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--factor", type=float, default=2.0)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--seed", type=int, default=13)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    series = demand_series()
    inputs = series.unfold(0, LAGS, 1)[:-1]
    targets = series[LAGS:]
    torch.manual_seed(args.seed)
    model = Forecaster()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    guard = SpikeGuard(args.factor)
    rng = np.random.default_rng(args.seed)
    for step in range(args.steps):
        picked = rng.choice(len(inputs), args.batch, replace=False)
        mine = torch.from_numpy(np.array_split(picked, world)[rank])
        error = model(inputs[mine]) - targets[mine]
        loss = error.square().mean()
        model.zero_grad()
        loss.backward()
        average_gradients(model)
        if guard.accept(loss):
            optimizer.step()
        if rank == 0 and step % 15 == 0:
            print(f"step {step} loss {loss.item():.4f} left out {guard.left_out}")

    if rank == 0:
        with torch.no_grad():
            mae = (model(inputs[-500:]) - targets[-500:]).abs().mean()
        print(f"mean absolute error {mae.item():.4f}, {guard.left_out} of {args.steps} updates left out")
    dist.barrier()
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
