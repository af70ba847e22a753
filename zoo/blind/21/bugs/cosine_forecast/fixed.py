"""Forecasting a synthetic load curve with dilated convolutions; warm-up and cosine decay."""
import math
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn


@dataclass
class Config:
    window: int = 32
    horizon: int = 4
    channels: int = 12
    global_batch: int = 64
    epochs: int = 3
    lr: float = 0.02
    warmup: float = 0.2
    clip: float = 0.5

    rank: int = int(os.environ.get("RANK", 0))
    world: int = int(os.environ.get("WORLD_SIZE", 1))

    @property
    def device_batch(self):
        return self.global_batch // self.world


class CausalConv(nn.Module):
    def __init__(self, inp, out, dilation):
        super().__init__()
        self.pad = nn.ConstantPad1d((2 * dilation, 0), 0.0)
        self.conv = nn.Conv1d(inp, out, 3, dilation=dilation)
        self.skip = nn.Conv1d(inp, out, 1) if inp != out else nn.Identity()

    def forward(self, x):
        return self.skip(x) + torch.tanh(self.conv(self.pad(x)))


class Forecaster(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        c = cfg.channels
        self.body = nn.Sequential(CausalConv(1, c, 1), CausalConv(c, c, 2), CausalConv(c, c, 4))
        self.head = nn.Linear(c, cfg.horizon)

    def forward(self, x):
        return self.head(self.body(x[:, None])[:, :, -1])


def load_curve(n):
    gen = torch.Generator().manual_seed(41)
    t = torch.arange(n, dtype=torch.get_default_dtype())
    curve = torch.sin(2 * math.pi * t / 24) + 0.5 * torch.sin(2 * math.pi * t / 168)
    walk = torch.randn(n, generator=gen).cumsum(0)
    return curve + 0.02 * walk + 0.1 * torch.randn(n, generator=gen)


def lr_lambda(cfg, total_steps):
    warm = max(1, int(cfg.warmup * total_steps))

    def factor(step):
        if step < warm:
            return (step + 1) / warm
        progress = min(1.0, (step - warm) / max(1, total_steps - warm))
        return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress))

    return factor


def main():
    torch.set_default_dtype(torch.float64)
    cfg = Config()
    if cfg.world > 1:
        dist.init_process_group("gloo")
    series = load_curve(1200)
    span = cfg.window + cfg.horizon
    windows = series.unfold(0, span, 1)
    train, test = windows[:1024], windows[1024:]

    torch.manual_seed(6)
    model = Forecaster(cfg)
    optimizer = torch.optim.SGD(model.parameters(), lr=cfg.lr, momentum=0.9)
    total_steps = cfg.epochs * (len(train) // cfg.global_batch)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_lambda(cfg, total_steps))

    for epoch in range(cfg.epochs):
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(epoch))
        running = 0.0
        for start in range(0, len(train), cfg.global_batch):
            mine = order[start + cfg.rank * cfg.device_batch:][:cfg.device_batch]
            rows = train[mine]
            loss = nn.functional.huber_loss(model(rows[:, :cfg.window]), rows[:, cfg.window:])
            optimizer.zero_grad()
            loss.backward()
            if cfg.world > 1:
                flat = torch.cat([p.grad.flatten() for p in model.parameters()])
                dist.all_reduce(flat)
                flat /= cfg.world
                for p, g in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()])):
                    p.grad.copy_(g.view_as(p))
            nn.utils.clip_grad_norm_(model.parameters(), cfg.clip)
            optimizer.step()
            schedule.step()
            running += loss.item()
        mean = torch.tensor(running / (len(train) // cfg.global_batch))
        if cfg.world > 1:
            dist.all_reduce(mean)
        with torch.no_grad():
            error = (model(test[:, :cfg.window]) - test[:, cfg.window:]).abs().mean().item()
        if cfg.rank == 0:
            print(f"epoch {epoch} loss {mean.item() / cfg.world:.10f} test error {error:.10f}")
    if cfg.world > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
