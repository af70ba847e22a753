import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29809")

BATCH, MICRO, LATENT, STEPS = 64, 16, 4, 100


class VAE(nn.Module):
    def __init__(self, warm=80):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 2 * LATENT))
        self.dec = nn.Sequential(nn.Linear(LATENT, 48), nn.Tanh(), nn.Linear(48, 64))
        self.warm = warm
        self.ticks = 0

    @property
    def beta(self):
        return min(1.0, self.ticks / self.warm)

    def forward(self, x, eps):
        mean, logvar = self.enc(x).chunk(2, 1)
        z = mean + eps * (0.5 * logvar).exp()
        rec = F.mse_loss(self.dec(z), x, reduction="none").sum(1)
        kl = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).sum(1)
        return rec, kl


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    torch.manual_seed(6)
    model = VAE()
    net = DDP(model)
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    parts = BATCH // MICRO // world
    for step in range(STEPS):
        g = torch.Generator().manual_seed(step)
        rows = torch.randint(len(x), (BATCH,), generator=g)[rank::world]
        eps = torch.randn(BATCH, LATENT, generator=g)[rank::world]
        model.ticks += 1
        sums = torch.zeros(2)
        opt.zero_grad()
        for xb, eb in zip(x[rows].split(MICRO), eps.split(MICRO)):
            rec, kl = net(xb, eb)
            loss = (rec + model.beta * kl).mean() / parts
            loss.backward()
            sums += torch.stack([rec.sum(), kl.sum()]).detach()
        opt.step()
        if step % 20 == 19:
            dist.all_reduce(sums)
            rec, kl = (sums / BATCH).tolist()
            if rank == 0:
                print(f"step {step + 1}: reconstruction {rec:.4f}, divergence {kl:.4f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
