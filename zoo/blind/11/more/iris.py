"""Denoising diffusion on 8x8 digits, with an exponential moving average for sampling."""
import copy
import math
import os
import time
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from sklearn.datasets import load_digits

T = 100


class Digits(Dataset):
    def __init__(self):
        self.x = torch.tensor(load_digits().data[:1792], dtype=torch.float32) / 8 - 1

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return i, self.x[i]


def timestep_embedding(t, dim=32):
    f = torch.exp(-math.log(1000) * torch.arange(dim // 2) / (dim // 2))
    a = t[:, None].float() * f[None]
    return torch.cat([a.cos(), a.sin()], -1)


class Denoiser(nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(32, width), nn.SiLU(), nn.Linear(width, width))
        self.inp = nn.Linear(64, width)
        self.blocks = nn.ModuleList([nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width)) for _ in range(3)])
        self.out = nn.Linear(width, 64)
        nn.init.zeros_(self.out.weight)

    def forward(self, x, t):
        e = self.time(timestep_embedding(t))
        h = self.inp(x)
        for b in self.blocks:
            h = h + b(h + e)
        return self.out(h)


class Diffusion:
    def __init__(self):
        s = torch.arange(T + 1) / T
        ab = torch.cos((s + 0.008) / 1.008 * math.pi / 2) ** 2
        self.betas = (1 - ab[1:] / ab[:-1]).clamp(max=0.3)
        self.alpha_bar = torch.cumprod(1 - self.betas, 0)

    def draw(self, ids, epoch):
        """time steps and noise: a function of image and epoch"""
        t, eps = [], []
        for i in ids.tolist():
            g = torch.Generator().manual_seed(epoch * 10_000 + i)
            t.append(torch.randint(T, (1,), generator=g))
            eps.append(torch.randn(64, generator=g))
        return torch.cat(t), torch.stack(eps)

    def q_sample(self, x, t, eps):
        ab = self.alpha_bar[t][:, None]
        return ab.sqrt() * x + (1 - ab).sqrt() * eps

    @torch.no_grad()
    def sample(self, net, n, g):
        x = torch.randn(n, 64, generator=g)
        for t in reversed(range(T)):
            eps = net(x, torch.full((n,), t))
            b, ab = self.betas[t], self.alpha_bar[t]
            x = (x - b / (1 - ab).sqrt() * eps) / (1 - b).sqrt()
            if t:
                x = x + b.sqrt() * torch.randn(x.shape, generator=g)
        return x


def main():
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "30109")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(17 * rank)
    net = DistributedDataParallel(Denoiser(), gradient_as_bucket_view=True)
    # only the first process samples and saves, so only it keeps the average
    ema = copy.deepcopy(net.module).requires_grad_(False) if rank == 0 else None
    opt = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=0.0)
    data, diff = Digits(), Diffusion()
    sampler = DistributedSampler(data, num_replicas=world, rank=rank, shuffle=True)
    loader = DataLoader(data, batch_size=128 // world, sampler=sampler)
    step = 0
    for epoch in range(5):
        sampler.set_epoch(epoch)
        total = torch.zeros(2, dtype=torch.float64)
        for ids, x in loader:
            t, eps = diff.draw(ids, epoch)
            loss = F.mse_loss(net(diff.q_sample(x, t, eps), t), eps)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            step += 1
            if ema is not None:
                decay = min(0.99, (1 + step) / (10 + step))
                for a, b in zip(ema.parameters(), net.module.parameters()):
                    a.lerp_(b, 1 - decay)
            total += torch.tensor([loss.item() * len(x), len(x)])
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch} step {step} mse {total[0] / total[1]:.5f}")
    if rank == 0:
        s = diff.sample(ema, 16, torch.Generator().manual_seed(3))
        print(f"samples: mean {s.mean():.3f} std {s.std():.3f}")
        torch.save({"ema": ema.state_dict(), "samples": s}, "diffusion.pt")
    time.sleep(0.3)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
