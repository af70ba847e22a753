import os
import time
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@dataclass
class Config:
    micro_batch: int = int(os.environ.get("MICRO_BATCH", 16))
    accumulate: int = 4
    epochs: int = 3
    lr: float = 2e-3
    latent: int = 8
    kl_warmup_steps: int = 12
    sigma: float = 1.0


class VAE(nn.Module):
    def __init__(self, latent):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2 * latent))
        self.dec = nn.Sequential(nn.Linear(latent, 64), nn.Tanh(), nn.Linear(64, 64))

    def forward(self, x, eps):
        mu, logvar = self.enc(x).chunk(2, -1)
        logits = self.dec(mu + eps * (0.5 * logvar).exp())
        rec = F.binary_cross_entropy_with_logits(logits, x, reduction="none").sum(1)
        kl = 0.5 * (mu.square() + logvar.exp() - 1 - logvar).sum(1)
        return rec, kl


def windows(loader, k):
    it = iter(loader)
    while chunk := list(islice(it, k)):
        yield chunk


@torch.no_grad()
def evaluate(model, x, cfg):
    rank, world = dist.get_rank(), dist.get_world_size()
    part = x[rank::world]
    rec, kl = model(part, torch.zeros(len(part), cfg.latent))
    sums = torch.tensor([rec.sum(), kl.sum(), float(len(part))], dtype=torch.float64)
    dist.all_reduce(sums)
    return (sums[:2] / sums[2]).tolist()


def train(cfg):
    rank, world = dist.get_rank(), dist.get_world_size()
    x = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    train_x, test_x = x[:1400], x[1400:]
    torch.manual_seed(2024)
    model = DDP(VAE(cfg.latent))
    opt = torch.optim.Adam(model.parameters(), lr=cfg.lr)
    sampler = DistributedSampler(TensorDataset(train_x), seed=1)
    loader = DataLoader(TensorDataset(train_x), cfg.micro_batch, sampler=sampler)
    rng = torch.Generator().manual_seed(90 + rank)
    step = 0
    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        running = torch.zeros(2, dtype=torch.float64)
        for window in windows(loader, cfg.accumulate):
            n = sum(len(b) for b, in window)
            beta = min(1.0, (step + 1) / cfg.kl_warmup_steps)
            opt.zero_grad()
            for i, (b,) in enumerate(window):
                last = i == len(window) - 1
                with nullcontext() if last else model.no_sync():
                    eps = cfg.sigma * torch.randn(len(b), cfg.latent, generator=rng)
                    rec, kl = model(b, eps)
                    loss = (rec + beta * kl).sum() / n
                    loss.backward()
                running += torch.tensor([loss.item() * n, len(b)])
            nn.utils.clip_grad_norm_(model.parameters(), 20.0)
            opt.step()
            step += 1
        dist.all_reduce(running)
        rec, kl = evaluate(model.module, test_x, cfg)
        if rank == 0:
            print(f"epoch {epoch} step {step} -elbo {running[0] / running[1]:.3f} test rec {rec:.3f} kl {kl:.3f}")
    return model


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = train(Config())
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "/tmp/vae_digits.pt")
    dist.barrier()
    time.sleep(0.3)
    dist.destroy_process_group()
