import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP

BATCH, STEPS, LATENT = 64, 120, 6


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(64, 48), nn.ReLU())
        self.mu = nn.Linear(48, LATENT)
        self.logvar = nn.Linear(48, LATENT)
        self.dec = nn.Sequential(nn.Linear(LATENT, 48), nn.ReLU(), nn.Linear(48, 64))

    def forward(self, x):
        h = self.enc(x)
        return self.mu(h), self.logvar(h)

    def decode(self, z):
        return self.dec(z)


def kl(mu, logvar):
    return -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(1)


def main():
    for k, v in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29841")):
        os.environ.setdefault(k, v)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x = torch.tensor(load_digits().data / 16, dtype=torch.float32)
    torch.manual_seed(9)
    model = DDP(VAE())
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    gen = torch.Generator().manual_seed(10)
    share = BATCH // world
    part = slice(rank * share, (rank + 1) * share)

    for step in range(1, STEPS + 1):
        rows = torch.randint(1500, (BATCH,), generator=gen)
        noise = torch.randn(BATCH, LATENT, generator=gen)
        batch = x[rows[part]]
        mu, logvar = model(batch)
        z = mu + noise[part] * (0.5 * logvar).exp()
        out = model.module.decode(z)
        recon = F.binary_cross_entropy_with_logits(out, batch, reduction="none").sum(1)
        loss = (recon + kl(mu, logvar)).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 20 == 0:
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step} elbo {-shown.item() / world:.4f}")

    with torch.no_grad():
        mu, logvar = model.module(x[1500:])
        out = model.module.decode(mu)
        error = F.mse_loss(out.sigmoid(), x[1500:])
    if rank == 0:
        print(f"test reconstruction {error.item():.6f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
