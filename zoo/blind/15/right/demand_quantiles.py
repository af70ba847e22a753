"""Quantile forecasts of daily demand: a causal convolution network with weight normalisation, pinball loss.

The rate is halved on a plateau of the validation loss, training stops early, the best weights are put back.
"""
import copy
import os
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.data import DataLoader, Dataset, DistributedSampler


@dataclass
class Config:
    past: int = 42
    ahead: int = 7
    batch: int = 64
    epochs: int = 9
    lr: float = 0.02
    patience: int = 2
    quantiles: tuple = (0.1, 0.5, 0.9)


class Windows(Dataset):
    """Windows over all series; each one is scaled by its own past."""

    def __init__(self, series, starts, cfg):
        self.series, self.cfg = series, cfg
        self.index = [(s, t) for s in range(len(series)) for t in starts]

    def __len__(self):
        return len(self.index)

    def __getitem__(self, i):
        s, t = self.index[i]
        window = self.series[s, t:t + self.cfg.past + self.cfg.ahead]
        window = window / (window[:self.cfg.past].mean() + 1.0)
        return window[:self.cfg.past], window[self.cfg.past:]


def make_series(n=16, days=150):
    rng = np.random.default_rng(3)
    t = np.arange(days)
    level = rng.uniform(5, 50, (n, 1))
    week = 1 + 0.5 * np.sin(2 * np.pi * (t / 7 + rng.uniform(size=(n, 1))))
    return torch.tensor(rng.poisson(level * week * (1 + 0.002 * t)), dtype=torch.float32)


class Forecaster(nn.Module):
    def __init__(self, cfg, width=16):
        super().__init__()
        self.convs = nn.ModuleList(weight_norm(nn.Conv1d(1 if i == 0 else width, width, 3, dilation=2 ** i)) for i in range(3))
        self.out = nn.Linear(width, cfg.ahead * len(cfg.quantiles))
        self.shape = cfg.ahead, len(cfg.quantiles)

    def forward(self, x):
        x = x[:, None]
        for i, conv in enumerate(self.convs):
            x = torch.relu(conv(F.pad(x, (2 * 2 ** i, 0))))
        return self.out(x[:, :, -1]).view(-1, *self.shape)


def pinball(forecast, y, cfg, reduction="mean"):
    q = forecast.new_tensor(cfg.quantiles)
    error = y[..., None] - forecast
    loss = torch.maximum(q * error, (q - 1) * error)
    return loss.mean() if reduction == "mean" else loss.sum()


@torch.no_grad()
def validate(net, loader, cfg):
    totals = torch.zeros(2, dtype=torch.float64)
    for x, y in loader:
        totals += torch.tensor([pinball(net(x), y, cfg, "sum").item(), y.numel() * len(cfg.quantiles)])
    dist.all_reduce(totals)
    return (totals[0] / totals[1]).item()


def main(cfg):
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29615")
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1234 * (rank + 1))
    series = make_series()
    train = Windows(series, range(0, 72, 3), cfg)
    valid = Windows(series, range(90, 101, 4), cfg)
    sampler = DistributedSampler(train, drop_last=True)
    loader = DataLoader(train, cfg.batch // world, sampler=sampler)
    valid_loader = DataLoader(valid, 7, sampler=range(rank, len(valid), world))        # 48 windows, unequal last batches

    net = DistributedDataParallel(Forecaster(cfg), gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(net.parameters(), lr=cfg.lr, eps=1e-5)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.01)
    best, kept, bad = float("inf"), None, 0
    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        total = 0.0
        for x, y in loader:
            loss = pinball(net(x), y, cfg)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_value_(net.parameters(), 0.1)
            optimizer.step()
            total += loss.item() / len(loader)
        value = validate(net.module, valid_loader, cfg)
        plateau.step(value)
        bad = 0 if value < best * 0.95 else bad + 1                  # epochs without a gain of a twentieth
        if value < best:
            best, kept = value, copy.deepcopy(net.module.state_dict())
        mean = torch.tensor(total)
        dist.all_reduce(mean)
        if rank == 0:
            print(f"epoch {epoch} train {mean.item() / world:.4f} valid {value:.4f} lr {optimizer.param_groups[0]['lr']:.4f}")
        if bad >= cfg.patience:
            break
    net.module.load_state_dict(kept)
    value = validate(net.module, valid_loader, cfg)
    if rank == 0:
        print(f"stopped after epoch {epoch}, kept {value:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Config())
