"""Variational autoencoder on digits; a guard leaves out updates while the loss is far above its average."""
import argparse
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class VAE(nn.Module):
    def __init__(self, hidden=64, latent=8):
        super().__init__()
        self.enc = nn.Linear(64, hidden)
        self.stats = nn.Linear(hidden, 2 * latent)
        self.dec = nn.Sequential(nn.Linear(latent, hidden), nn.ReLU(), nn.Linear(hidden, 64))

    def forward(self, x, noise):
        mu, logvar = self.stats(F.relu(self.enc(x))).chunk(2, 1)
        out = self.dec(mu + noise * (0.5 * logvar).exp())
        rec = ((out - x) ** 2).sum(1)
        kl = 0.5 * (mu ** 2 + logvar.exp() - 1 - logvar).sum(1)
        return (rec + 0.1 * kl).mean()


class SpikeGuard:
    def __init__(self, factor=1.6, decay=0.8, warmup=4):
        self.factor, self.decay, self.warmup = factor, decay, warmup
        self.average, self.calls, self.left_out = None, 0, 0

    def allows(self, loss):
        self.calls += 1
        if self.calls > self.warmup and loss > self.factor * self.average:
            self.left_out += 1
            return False
        self.average = loss if self.average is None else self.decay * self.average + (1 - self.decay) * loss
        return True


def images(broken):
    x = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    g = torch.Generator().manual_seed(4)
    some = torch.randperm(len(x), generator=g)[:broken]
    x[some] += 2.5 * torch.randn(broken, 64, generator=g)  # scans with a defective sensor
    return x


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=50)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--broken", type=int, default=12)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x = images(args.broken)
    torch.manual_seed(8)
    model = DDP(VAE())
    opt = torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-5)
    guard = SpikeGuard()
    g = torch.Generator().manual_seed(60)
    for step in range(args.steps):
        rows = torch.randperm(len(x), generator=g)[:args.batch]
        noise = torch.randn(args.batch, 8, generator=g)
        batch, noise = x[rows][rank::world], noise[rank::world]
        loss = model(batch, noise)
        opt.zero_grad()
        loss.backward()
        level = loss.detach() / world
        dist.all_reduce(level)
        if guard.allows(level.item()):
            opt.step()
        if step % 10 == 9 and rank == 0:
            print(f"step {step + 1} average {guard.average:.4f} left out {guard.left_out}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
