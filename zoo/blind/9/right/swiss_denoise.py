"""Denoising diffusion on a 2-d swiss roll. Time step and noise of a sample depend on its number and the epoch."""
import os
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import make_swiss_roll
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

T = 50


class Noised(Dataset):
    def __init__(self, n=1024):
        pts, _ = make_swiss_roll(n, noise=0.3, random_state=9)
        self.pts = (pts[:, [0, 2]] / 8).astype(np.float32)
        self.abar = np.cumprod(1 - np.linspace(1e-4, 0.06, T)).astype(np.float32)
        self.epoch = 0

    def __len__(self):
        return len(self.pts)

    def __getitem__(self, i):
        rng = np.random.default_rng((self.epoch, i))
        t = int(rng.integers(T))
        eps = rng.standard_normal(2).astype(np.float32)
        a = self.abar[t]
        return np.sqrt(a) * self.pts[i] + np.sqrt(1 - a) * eps, np.float32(t / T), eps


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2))

    def forward(self, x, t):
        return self.net(torch.cat([x, t[:, None]], 1))


def main():
    for k, v in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "30702"}.items():
        os.environ.setdefault(k, v)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    data = Noised()
    # stored points are shuffled already; rows go round the processes in order, the same way each epoch
    sampler = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, batch_size=64 // world, sampler=sampler)
    torch.manual_seed(9)
    model = DDP(Denoiser())
    ema = {k: v.clone() for k, v in model.module.state_dict().items()}
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(6):
        data.epoch = epoch
        total = torch.zeros(())
        for x, t, eps in loader:
            loss = (model(x, t) - eps).square().mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.detach()
            with torch.no_grad():
                for k, v in model.module.state_dict().items():
                    ema[k].lerp_(v, 0.05)
        dist.all_reduce(total)
        drift = sum((ema[k] - v).square().sum().item() for k, v in model.module.state_dict().items())
        if rank == 0:
            print(f"epoch {epoch} loss {total.item() / world / len(loader):.5f} distance of average {drift:.5f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
