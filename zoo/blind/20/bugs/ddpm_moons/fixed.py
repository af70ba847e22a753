"""Denoising diffusion on two moons, judged with an exponential moving average of the weights."""
import copy
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import make_moons
from torch.nn.parallel import DistributedDataParallel as DDP

GLOBAL_BATCH, STEPS, LEVELS = 64, 120, 50
HALF_LIFE = 1500  # in training samples


class ScoreNet(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.register_buffer("freqs", torch.exp(torch.linspace(0, math.log(100), 8)))
        self.inp = nn.Linear(2 + 16, width)
        self.mid = nn.Linear(width, width)
        self.out = nn.Linear(width, 2)

    def forward(self, x, level):
        angle = (level.unsqueeze(1) + 1) / LEVELS * self.freqs
        h = F.silu(self.inp(torch.cat([x, angle.sin(), angle.cos()], dim=1)))
        return self.out(F.silu(self.mid(h)) + h)


class Diffusion:
    def __init__(self):
        beta = torch.linspace(1e-3, 0.15, LEVELS)
        self.alpha_bar = (1 - beta).cumprod(0)

    def loss(self, net, x, level, noise):
        a = self.alpha_bar[level].unsqueeze(1)
        return F.mse_loss(net(a.sqrt() * x + (1 - a).sqrt() * noise, level), noise)


class EMA:
    def __init__(self, model, half_life):
        self.model = copy.deepcopy(model).requires_grad_(False)
        self.half_life = half_life

    @torch.no_grad()
    def update(self, model, n_samples):
        decay = 0.5 ** (n_samples / self.half_life)
        for slow, fast in zip(self.model.parameters(), model.parameters()):
            slow.lerp_(fast, 1 - decay)


def load():
    x, _ = make_moons(2400, noise=0.05, random_state=3)
    x = torch.tensor(x)
    x = (x - x.mean(0)) / x.std(0)
    return x[:2000], x[2000:]


def draw(gen, data, count):
    rows = torch.randint(len(data), (count,), generator=gen)
    level = torch.randint(LEVELS, (count,), generator=gen)
    noise = torch.randn(count, 2, generator=gen)
    return data[rows], level, noise


def main():
    torch.set_default_dtype(torch.float64)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    train, test = load()
    torch.manual_seed(9)
    model = ScoreNet()
    net = DDP(model) if world > 1 else model
    ema = EMA(model, HALF_LIFE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=20)
    diffusion = Diffusion()
    gen = torch.Generator().manual_seed(123)

    for step in range(STEPS):
        x, level, noise = (t[rank::world] for t in draw(gen, train, GLOBAL_BATCH))
        loss = diffusion.loss(net, x, level, noise)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warmup.step()
        ema.update(model, n_samples=GLOBAL_BATCH)

    if rank == 0:
        x, level, noise = draw(torch.Generator().manual_seed(321), test, 2000)
        with torch.no_grad():
            raw = diffusion.loss(model, x, level, noise).item()
            smooth = diffusion.loss(ema.model, x, level, noise).item()
        print(f"denoising error: last weights {raw:.10f}, averaged weights {smooth:.10f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
