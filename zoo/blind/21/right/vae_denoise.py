"""Denoising VAE on curves.

Noise, dropout and latent samples come from a stream of its own on every rank (seed + rank), so single
runs differ in their draws with the number of processes. Lines marked "rank 0" are local to that rank.
"""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

POINTS, LATENT, BATCH, EPOCHS, SEED = 32, 4, 32, 3, 100
NOISE, DROP = 0.2, 0.1


def curves(n, seed):
    g = torch.Generator().manual_seed(seed)
    t = torch.linspace(0, 1, POINTS)
    a, f, p = torch.rand(3, n, 1, generator=g)
    return (0.5 + a) * torch.sin(6.28 * ((1 + 2 * f) * t + p))


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(POINTS, 64), nn.ReLU(), nn.Dropout(DROP), nn.Linear(64, 2 * LATENT))
        self.dec = nn.Sequential(nn.Linear(LATENT, 64), nn.ReLU(), nn.Dropout(DROP), nn.Linear(64, POINTS))

    def forward(self, x):
        mean, logvar = self.enc(x).chunk(2, 1)
        z = mean
        if self.training:
            z = z + torch.randn_like(mean) * (0.5 * logvar).exp()
        return self.dec(z), mean, logvar


def terms(model, noisy, clean):
    out, mean, logvar = model(noisy)
    error = (out - clean).square().sum(1)
    kl = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).sum(1)
    return error, kl


def main():
    rank, world = 0, 1
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    train, valid = curves(512, 1), curves(130, 2)
    torch.manual_seed(SEED)
    net = VAE()
    model = DDP(net) if dist.is_initialized() else net
    torch.manual_seed(SEED + rank)
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    sampler = DistributedSampler(train, world, rank, shuffle=True, seed=9)
    loader = DataLoader(TensorDataset(train), batch_size=BATCH // world, sampler=sampler)
    steps = 0

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        net.train()
        began = time.perf_counter()
        shard = 0.0
        for (x,) in loader:
            beta = min(1.0, steps / 30) * 0.1
            noisy = x + NOISE * torch.randn_like(x)
            error, kl = terms(model, noisy, x)
            loss = (error + beta * kl).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            steps += 1
            shard += loss.item() / len(loader)
        seconds = time.perf_counter() - began

        net.eval()
        with torch.no_grad():
            error, kl = terms(net, valid[rank::world], valid[rank::world])
        sums = torch.stack([error.sum(), kl.sum()])
        if dist.is_initialized():
            dist.all_reduce(sums)
        if rank == 0:
            print(f"epoch {epoch} validation error {sums[0] / len(valid):.4f} kl {sums[1] / len(valid):.4f}")
            print(f"  rank 0: loss on own shard {shard:.4f}, {len(train) / seconds:.0f} curves/s over all ranks")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
