"""One-day-ahead forecasts of synthetic load curves, with a planned preemption in the middle."""
import dataclasses
import math
import os
import tempfile
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


@dataclasses.dataclass
class Config:
    windows: int = 720
    history: int = 48
    horizon: int = 12
    global_batch: int = 40
    steps: int = 44
    preempt_at: int = 25
    lr: float = 2e-3
    seed: int = 21


def curves(cfg):
    g = torch.Generator().manual_seed(cfg.seed)
    t = torch.arange(cfg.history + cfg.horizon, dtype=torch.float32)
    phase = torch.rand(cfg.windows, 1, generator=g) * 2 * math.pi
    slow = torch.rand(cfg.windows, 1, generator=g) + 0.5
    daily = torch.sin(2 * math.pi * t / 24 + phase) + 0.4 * torch.sin(2 * math.pi * t * slow / 60)
    noisy = daily + 0.1 * torch.randn(daily.shape, generator=g)
    return noisy[:, :cfg.history], noisy[:, cfg.history:]


class SignMomentum:
    """Lion-like: moves by the softened sign of an interpolated momentum."""

    def __init__(self, params, lr, betas=(0.9, 0.98), soft=1e-3):
        self.params, self.lr, self.betas, self.soft = list(params), lr, betas, soft
        self.momentum = [torch.zeros_like(p) for p in self.params]

    @torch.no_grad()
    def step(self):
        b1, b2 = self.betas
        for p, m in zip(self.params, self.momentum):
            mixed = b1 * m + (1 - b1) * p.grad
            p.sub_(self.lr * mixed / (mixed.abs() + self.soft))
            m.mul_(b2).add_(p.grad, alpha=1 - b2)
            p.grad = None


class Run:
    def __init__(self, cfg):
        self.cfg = cfg
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.inputs, self.targets = curves(cfg)
        torch.manual_seed(cfg.seed)
        self.model = DDP(nn.Sequential(nn.Linear(cfg.history, 64), nn.GELU(), nn.Linear(64, cfg.horizon)))
        self.optimizer = SignMomentum(self.model.parameters(), cfg.lr)
        self.step, self.consumed, self.losses = 0, 0, []

    def batches(self):
        """Endless; starts after the samples that were consumed so far."""
        epoch, offset = divmod(self.consumed, self.cfg.windows)
        share = self.cfg.global_batch // self.world
        while True:
            g = torch.Generator().manual_seed(self.cfg.seed * 1000 + epoch)
            perm = torch.randperm(self.cfg.windows, generator=g)
            for at in range(offset, self.cfg.windows - self.cfg.global_batch + 1, self.cfg.global_batch):
                mine = perm[at + self.rank * share:at + (self.rank + 1) * share]
                yield self.inputs[mine], self.targets[mine]
            epoch, offset = epoch + 1, 0

    def train(self, until):
        for x, y in self.batches():
            loss = nn.functional.smooth_l1_loss(self.model(x), y)
            loss.backward()
            self.optimizer.step()
            self.step += 1
            self.consumed += len(x) * self.world
            self.losses.append(loss.item())
            if self.step >= until:
                return

    def save(self, path):
        if self.rank == 0:
            torch.save({"model": self.model.module.state_dict(), "momentum": self.optimizer.momentum,
                        "step": self.step, "consumed": self.consumed}, path)
        dist.barrier()

    @classmethod
    def resume(cls, cfg, path):
        run, state = cls(cfg), torch.load(path)
        run.model.module.load_state_dict(state["model"])
        run.optimizer.momentum = state["momentum"]
        run.step, run.consumed = state["step"], state["consumed"]
        return run


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    cfg, where = Config(), [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(where)
    path = os.path.join(where[0], "run.pt")

    run = Run(cfg)
    run.train(cfg.preempt_at)
    run.save(path)
    run = Run.resume(cfg, path)
    run.train(cfg.steps)
    if run.rank == 0:
        print(f"resumed at {cfg.preempt_at}, {run.step} steps, last loss {run.losses[-1]:.5f}", flush=True)
    model = run.model
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
