"""Metric learning on the digits with one learned proxy per class (Proxy-NCA), gradients averaged by hand."""
import argparse
import os
import random
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits


def seed_everything(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class Encoder(nn.Module):
    def __init__(self, dim=12):
        super().__init__()
        self.conv = nn.Conv2d(1, 12, 3, padding=1)
        self.proj = nn.Linear(12 * 16, dim)

    def forward(self, x):
        h = F.max_pool2d(F.relu(self.conv(x)), 2)
        return F.normalize(self.proj(h.flatten(1)), dim=1)


class ProxyNCA(nn.Module):
    def __init__(self, classes=10, dim=12, temperature=0.2):
        super().__init__()
        self.proxies = nn.Parameter(torch.randn(classes, dim))
        self.temperature = temperature

    def forward(self, z, y):
        d = torch.cdist(z, F.normalize(self.proxies, dim=1)).pow(2)
        return F.cross_entropy(-d / self.temperature, y)


def broadcast_module(module):
    for t in list(module.parameters()) + list(module.buffers()):
        dist.broadcast(t.data, src=0)


def average_gradients(params, world):
    for p in params:
        dist.all_reduce(p.grad)
        p.grad.div_(world)


def recall_at_1(encoder, x, y):
    with torch.no_grad():
        z = encoder(x)
        sim = z @ z.T
        sim.fill_diagonal_(-2)
        spread = torch.stack([z[y == c].mean(0) for c in range(10)]).norm(dim=1).mean()
    return (y[sim.argmax(1)] == y).float().mean().item(), spread.item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    seed_everything(args.seed + rank)

    bunch = load_digits()
    x = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    y = torch.tensor(bunch.target)
    encoder, criterion = Encoder(), ProxyNCA()
    broadcast_module(encoder)
    broadcast_module(criterion)
    params = list(encoder.parameters()) + list(criterion.parameters())
    opt = torch.optim.Adam([{"params": encoder.parameters(), "lr": 4e-3},
                            {"params": criterion.parameters(), "lr": 2e-2}])

    sampler = torch.Generator().manual_seed(args.seed)
    for step in range(1, args.steps + 1):
        idx = torch.randint(1400, (args.batch,), generator=sampler)[rank::world]
        loss = criterion(encoder(x[idx]), y[idx])
        opt.zero_grad()
        loss.backward()
        average_gradients(params, world)
        opt.step()
        if step % 10 == 0:
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step} loss {shown.item() / world:.5f}")

    recall, spread = recall_at_1(encoder, x[1400:], y[1400:])
    if rank == 0:
        print(f"recall@1 {recall:.4f} class concentration {spread:.5f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
