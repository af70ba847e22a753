"""Diffusion on two moons; only process 0 keeps the averaged net and draws from it."""
import copy
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import make_moons
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

BATCH, EPOCHS, LEVELS = 64, 6, 50
BETA = torch.linspace(1e-4, 0.15, LEVELS)
KEPT = torch.cumprod(1 - BETA, 0)


class Noised(Dataset):
    def __init__(self):
        x, _ = make_moons(1024, noise=0.05, random_state=0)
        self.x = torch.tensor(x, dtype=torch.float32)
        self.epoch = 0

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.epoch * len(self) + i)
        level = torch.randint(LEVELS, (), generator=g)
        noise = torch.randn(2, generator=g)
        return KEPT[level].sqrt() * self.x[i] + (1 - KEPT[level]).sqrt() * noise, level, noise


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.level = nn.Embedding(LEVELS, 16)
        self.body = nn.Sequential(nn.Linear(18, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2))

    def forward(self, x, level):
        return self.body(torch.cat([x, self.level(level)], 1))


@torch.no_grad()
def sample(net, count=256):
    g = torch.Generator().manual_seed(1)
    x = torch.randn(count, 2, generator=g)
    for t in reversed(range(LEVELS)):
        eps = net(x, torch.full((count,), t))
        x = (x - BETA[t] / (1 - KEPT[t]).sqrt() * eps) / (1 - BETA[t]).sqrt()
        if t:
            x = x + BETA[t].sqrt() * torch.randn(count, 2, generator=g)
    return x


def main():
    for k, v in dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29813").items():
        os.environ.setdefault(k, v)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    data = Noised()
    sampler = DistributedSampler(data, seed=5)
    loader = DataLoader(data, batch_size=BATCH // world, sampler=sampler)
    torch.manual_seed(9)
    model = DDP(Denoiser())
    average = copy.deepcopy(model.module) if rank == 0 else None
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        data.epoch = epoch
        total = torch.zeros(())
        for x, level, noise in loader:
            loss = (model(x, level) - noise).square().mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.detach() / len(loader)
            if average is not None:
                with torch.no_grad():
                    for a, p in zip(average.parameters(), model.module.parameters()):
                        a.lerp_(p, 0.05)
        dist.reduce(total, 0)
        if rank == 0:
            print(f"epoch {epoch}: loss {total.item() / world:.5f}", flush=True)
    if rank == 0:
        made = sample(average)
        print(f"samples: mean {made.mean(0).tolist()[0]:.4f} spread {made.std().item():.4f}", flush=True)
    dist.barrier()
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
