"""Forecast ragged sensor series with FSDP2, gradient accumulation and an averaged copy of the weights."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule, fully_shard

STEPS, BATCH, MICRO, HORIZON = 40, 32, 2, 24


class Mixer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc1, self.fc2 = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x):
        return x + self.fc2(F.gelu(self.fc1(self.norm(x))))


class Forecaster(nn.Module):
    def __init__(self, context=32, width=36):
        super().__init__()
        self.enc = nn.Linear(context, width)
        self.blocks = nn.ModuleList(Mixer(width) for _ in range(3))
        self.dec = nn.Linear(width, HORIZON)

    def forward(self, x):
        h = self.enc(x)
        for b in self.blocks:
            h = b(h)
        return self.dec(h)


def sensors(count, seed):
    g = torch.Generator().manual_seed(seed)
    t = torch.arange(32 + HORIZON)
    freq = 0.1 + 0.5 * torch.rand(count, 1, generator=g)
    phase = 6.28 * torch.rand(count, 1, generator=g)
    series = torch.sin(freq * t + phase) + 0.1 * torch.randn(count, len(t), generator=g)
    known = torch.randint(4, HORIZON + 1, (count, 1), generator=g)
    return series[:, :32], series[:, 32:], (torch.arange(HORIZON) < known).float()


def squared_error(pred, target, mask):
    return ((pred - target) ** 2 * mask).sum()


class Averaged:
    """Exponential moving average; each process averages its own shards."""

    def __init__(self, model, decay):
        self.model, self.decay = model, decay
        self.shadow = [p.detach().clone() for p in model.parameters()]

    @torch.no_grad()
    def update(self):
        for s, p in zip(self.shadow, self.model.parameters()):
            s.mul_(self.decay).add_(p.detach(), alpha=1 - self.decay)

    @torch.no_grad()
    def swap(self):
        for s, p in zip(self.shadow, self.model.parameters()):
            keep = p.detach().clone()
            p.copy_(s)
            s.copy_(keep)


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    train, test = sensors(640, 1), sensors(200, 2)

    torch.manual_seed(13)
    model = Forecaster()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    for m in model.modules():
        if isinstance(m, FSDPModule):
            m.set_gradient_divide_factor(1.0)  # the loss is already divided by the global count
            m.set_force_sum_reduction_for_comms(True)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    ema = Averaged(model, 0.9)

    draw = torch.Generator().manual_seed(77)
    for step in range(STEPS):
        rows = torch.randint(len(train[0]), (BATCH,), generator=draw)
        x, y, mask = (t[rows.chunk(world)[rank]] for t in train)
        points = mask.sum()
        dist.all_reduce(points)
        pieces = list(zip(x.chunk(MICRO), y.chunk(MICRO), mask.chunk(MICRO)))
        for i, (a, b, m) in enumerate(pieces):
            model.set_requires_gradient_sync(i == len(pieces) - 1)
            (squared_error(model(a), b, m) / points).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
        opt.zero_grad()
        ema.update()
        if rank == 0 and step % 10 == 9:
            print(f"step {step + 1} points {points.item():.0f}")
        norm = norm.full_tensor()

    ema.swap()
    x, y, mask = (t[rank::world] for t in test)
    with torch.no_grad():
        total = torch.stack([squared_error(model(x), y, mask), mask.sum()])
    dist.all_reduce(total)
    if rank == 0:
        print(f"last gradient norm {norm.item():.5f} averaged weights: test mse {total[0] / total[1]:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
