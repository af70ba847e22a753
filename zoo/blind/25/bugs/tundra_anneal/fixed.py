"""Variational autoencoder of the digits; the weight of the KL term grows with the number of images seen."""
import os
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP


@dataclass
class Config:
    batch: int = 64
    steps: int = 50
    latent: int = 6
    lr: float = 3e-3
    kl_warmup_images: int = 2400
    seed: int = 31


class VAE(nn.Module):
    def __init__(self, latent):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2 * latent))
        self.dec = nn.Sequential(nn.Linear(latent, 64), nn.SiLU(), nn.Linear(64, 64))

    def forward(self, x, eps):
        mu, logvar = self.enc(x).chunk(2, dim=1)
        recon = self.dec(mu + eps * torch.exp(0.5 * logvar))
        return recon, mu, logvar


class Trainer:
    def __init__(self, cfg, rank, world):
        self.cfg, self.rank, self.world = cfg, rank, world
        torch.manual_seed(cfg.seed)
        self.model = DDP(VAE(cfg.latent))
        self.opt = torch.optim.Adam(self.model.parameters(), lr=cfg.lr)
        self.x = torch.tensor(load_digits().data, dtype=torch.float32) / 16
        self.gen = torch.Generator().manual_seed(cfg.seed + 1)
        self.images_seen = 0

    @property
    def beta(self):
        return min(1.0, self.images_seen / self.cfg.kl_warmup_images)

    def next_batch(self):
        idx = torch.randint(len(self.x), (self.cfg.batch,), generator=self.gen)
        eps = torch.randn(self.cfg.batch, self.cfg.latent, generator=self.gen)
        return self.x[idx][self.rank::self.world], eps[self.rank::self.world]

    def train_step(self):
        x, eps = self.next_batch()
        recon, mu, logvar = self.model(x, eps)
        rec = F.binary_cross_entropy_with_logits(recon, x, reduction="none").sum(1).mean()
        kl = (-0.5 * (1 + logvar - mu.pow(2) - logvar.exp())).sum(1).mean()
        loss = rec + self.beta * kl
        self.opt.zero_grad(set_to_none=True)
        loss.backward()
        self.opt.step()
        self.images_seen += x.size(0) * self.world
        return torch.stack([rec.detach(), kl.detach()])

    def fit(self):
        for step in range(1, self.cfg.steps + 1):
            parts = self.train_step()
            if step % 10 == 0:
                dist.all_reduce(parts)
                parts /= self.world
                if self.rank == 0:
                    print(f"step {step} beta {self.beta:.3f} rec {parts[0]:.4f} kl {parts[1]:.4f}", flush=True)

    def elbo(self):
        with torch.no_grad():
            recon, mu, logvar = self.model.module(self.x, torch.zeros(len(self.x), self.cfg.latent))
            rec = F.binary_cross_entropy_with_logits(recon, self.x, reduction="none").sum(1).mean()
            kl = (-0.5 * (1 + logvar - mu.pow(2) - logvar.exp())).sum(1).mean()
        return -(rec + kl).item()


if __name__ == "__main__":
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    trainer = Trainer(Config(), dist.get_rank(), dist.get_world_size())
    trainer.fit()
    value = trainer.elbo()
    if trainer.rank == 0:
        print(f"elbo at the mean code {value:.5f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()
