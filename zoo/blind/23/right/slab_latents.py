"""A small VAE of handwritten digits; DDP, and Adam's state divided over the workers (ZeroRedundancyOptimizer)."""
import math
import os
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP


@dataclass
class Config:
    batch: int = 64
    steps: int = 55
    latent: int = 6
    hidden: int = 64
    lr: float = 2e-2
    seed: int = 13
    kl_steps: int = 20
    beta: float = 0.05


class VAE(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(64, cfg.hidden), nn.Softplus(), nn.Linear(cfg.hidden, 2 * cfg.latent))
        self.dec = nn.Sequential(nn.Linear(cfg.latent, cfg.hidden), nn.Softplus(), nn.Linear(cfg.hidden, 64))

    def forward(self, x, eps):
        mu, logvar = self.enc(x).chunk(2, dim=1)
        z = mu + eps * torch.exp(0.5 * logvar)
        rec = F.binary_cross_entropy_with_logits(self.dec(z), x, reduction="none").sum(1)
        kl = 0.5 * (mu ** 2 + logvar.exp() - 1 - logvar).sum(1)
        return rec, kl


class Trainer:
    def __init__(self, cfg, rank, world):
        self.cfg, self.rank, self.world = cfg, rank, world
        data = torch.tensor(load_digits().data / 16.0, dtype=torch.float32)
        cut = torch.randperm(len(data), generator=torch.Generator().manual_seed(cfg.seed))
        self.train, self.valid = data[cut[:1408]], data[cut[1408:]]
        torch.manual_seed(cfg.seed)
        self.model = DDP(VAE(cfg))
        self.opt = ZeroRedundancyOptimizer(self.model.parameters(), optimizer_class=torch.optim.Adam, lr=cfg.lr)
        torch.manual_seed(5000 + rank)  # from here on everyone has a stream of their own

    def slab(self, whole):
        size = len(whole) // self.world
        return whole[self.rank * size:(self.rank + 1) * size]

    def batch(self, step):
        per_lap = len(self.train) // self.cfg.batch
        lap, place = divmod(step, per_lap)
        order = torch.randperm(len(self.train), generator=torch.Generator().manual_seed(600 + lap))
        rows = order[place * self.cfg.batch:(place + 1) * self.cfg.batch]
        noise = torch.randn(self.cfg.batch, self.cfg.latent, generator=torch.Generator().manual_seed(10_000 + step))
        return self.train[self.slab(rows)], self.slab(noise)

    def fit(self):
        for step in range(self.cfg.steps):
            x, eps = self.batch(step)
            beta = self.cfg.beta * min(1.0, (step + 1) / self.cfg.kl_steps)
            rec, kl = self.model(x, eps)
            loss = (rec + beta * kl).mean()
            self.opt.zero_grad()
            loss.backward()
            for g in self.opt.param_groups:
                g["lr"] = self.cfg.lr * 0.5 * (1 + math.cos(math.pi * step / self.cfg.steps))
            self.opt.step()
            shown = torch.stack([rec.mean(), kl.mean()]).detach() / self.world
            dist.all_reduce(shown)
            if self.rank == 0 and (step + 1) % 11 == 0:
                print(f"step {step + 1:3d}  reconstruction {shown[0]:.4f}  kl {shown[1]:.4f}  beta {beta:.2f}", flush=True)

    @torch.no_grad()
    def evaluate(self):
        part = self.valid.tensor_split(self.world)[self.rank]
        noise = torch.randn(len(self.valid), self.cfg.latent, generator=torch.Generator().manual_seed(1))
        rec, kl = self.model.module(part, noise.tensor_split(self.world)[self.rank])
        out = torch.tensor([(rec + kl).double().sum(), len(part)], dtype=torch.float64)
        dist.all_reduce(out)
        return (out[0] / out[1]).item()

    @torch.no_grad()
    def preview(self):
        """Brightness of a few digits dreamt up by this worker."""
        dreams = torch.sigmoid(self.model.module.dec(torch.randn(8, self.cfg.latent)))
        return dreams.mean().item()


if __name__ == "__main__":
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    trainer = Trainer(Config(), dist.get_rank(), dist.get_world_size())
    trainer.fit()
    elbo = trainer.evaluate()
    print(f"worker {trainer.rank}: brightness of its dreams {trainer.preview():.4f}", flush=True)
    if trainer.rank == 0:
        print(f"validation bound {-elbo:.5f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()
