"""Regression on a synthetic table.  Before the real run a few learning rates are tried on a small
subset; the processes share that work among themselves."""
import argparse
import copy
import math
import time
from dataclasses import dataclass, field
from typing import List

import torch
import torch.distributed as dist
from torch import nn


@dataclass
class Config:
    rows: int = 2048
    features: int = 24
    global_batch: int = 64
    steps: int = 40
    probe_steps: int = 12
    probe_rows: int = 256
    seed: int = 21
    candidates: List[float] = field(default_factory=lambda: [1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3])


def make_table(cfg):
    g = torch.Generator().manual_seed(cfg.seed)
    x = torch.randn(cfg.rows, cfg.features, generator=g)
    w = torch.randn(cfg.features, 3, generator=g)
    hidden = torch.tanh(x @ w)
    y = hidden[:, :1] * 2 + hidden[:, 1:2] * hidden[:, 2:] + 0.05 * torch.randn(cfg.rows, 1, generator=g)
    return x, y


def make_model(cfg):
    torch.manual_seed(cfg.seed)
    return nn.Sequential(nn.Linear(cfg.features, 32), nn.SiLU(), nn.Linear(32, 16), nn.SiLU(), nn.Linear(16, 1))


def probe(model, lr, x, y, cfg):
    """Loss on the second half of the subset after a short run on the first half."""
    model = copy.deepcopy(model)
    optim = torch.optim.Adam(model.parameters(), lr=lr)
    half = cfg.probe_rows // 2
    for _ in range(cfg.probe_steps):
        optim.zero_grad()
        nn.functional.mse_loss(model(x[:half]), y[:half]).backward()
        optim.step()
    with torch.no_grad():
        return nn.functional.mse_loss(model(x[half:cfg.probe_rows]), y[half:cfg.probe_rows]).item()


def choose_lr(model, x, y, cfg, rank, world):
    mine = cfg.candidates[rank::world]
    results = [probe(model, lr, x, y, cfg) for lr in mine]
    gathered = [None] * world
    dist.all_gather_object(gathered, results)
    trials = list(zip((r for part in gathered for r in part), cfg.candidates))
    score, lr = min(t for t in trials if math.isfinite(t[0]))
    if rank == 0:
        print(f"tried {len(trials)} rates, taking {lr:g} (loss {score:.6f})")
    return lr


def average_gradients(model, world):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world


def main(cfg):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = make_table(cfg)
    model = make_model(cfg)
    lr = choose_lr(model, x, y, cfg, rank, world)
    optim = torch.optim.Adam(model.parameters(), lr=lr)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(optim, cfg.steps, eta_min=lr / 20)
    pick = torch.Generator().manual_seed(cfg.seed + 1)
    for step in range(cfg.steps):
        rows = torch.randint(cfg.rows, (cfg.global_batch,), generator=pick)[rank::world]
        loss = nn.functional.mse_loss(model(x[rows]), y[rows])
        optim.zero_grad()
        loss.backward()
        average_gradients(model, world)
        optim.step()
        sched.step()
        if step % 10 == 9:
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step + 1:3d}  mse {shown.item() / world:.6f}  lr {sched.get_last_lr()[0]:.6g}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--steps", type=int, default=Config.steps)
    ap.add_argument("--seed", type=int, default=Config.seed)
    a = ap.parse_args()
    main(Config(steps=a.steps, seed=a.seed))
