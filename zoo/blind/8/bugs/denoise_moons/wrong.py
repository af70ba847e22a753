import math
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import make_moons
from torch.nn.parallel import DistributedDataParallel as DDP

BATCH, STEPS, T = 128, 150, 50


class Denoiser(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.register_buffer("freq", torch.exp(torch.linspace(0, 3, 8)))
        self.net = nn.Sequential(nn.Linear(2 + 16, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 2))

    def forward(self, x, t):
        angle = t[:, None].float() / T * self.freq
        return self.net(torch.cat([x, angle.sin(), angle.cos()], dim=1))


def schedule():
    steps = torch.arange(T + 1) / T
    bar = torch.cos((steps + 0.01) / 1.01 * math.pi / 2) ** 2
    return (bar / bar[0])[1:]


class Batches:
    """Data rows, times and noise of each global batch; every process takes its part."""

    def __init__(self, data, rank, world, seed):
        self.data, self.rank, self.world = data, rank, world
        self.gen = torch.Generator().manual_seed(seed)

    def __next__(self):
        rows = torch.randint(len(self.data), (BATCH,), generator=self.gen)
        t = torch.randint(T, (BATCH,), generator=self.gen)
        eps = torch.randn(BATCH, 2, generator=self.gen)
        part = slice(self.rank, None, self.world)
        return self.data[rows[part]], t[part], eps[part]


def main():
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29819")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    points, _ = make_moons(2000, noise=0.05, random_state=1)
    data = torch.tensor((points - points.mean(0)) / points.std(0), dtype=torch.float32)
    bar = schedule()
    torch.manual_seed(8)
    model = DDP(Denoiser())
    opt = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    warm = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / 10))
    batches = Batches(data, rank, world, seed=3)

    smooth = None
    for step in range(1, STEPS + 1):
        x0, t, eps = next(batches)
        a = bar[t][:, None]
        xt = a.sqrt() * x0 + (1 - a).sqrt() * eps
        error = F.mse_loss(model(xt, t), eps, reduction="sum")
        loss = error / BATCH
        opt.zero_grad()
        loss.backward()
        opt.step()
        warm.step()

        seen = error.detach() / BATCH
        dist.all_reduce(seen)
        smooth = seen.item() if smooth is None else 0.95 * smooth + 0.05 * seen.item()
        if rank == 0 and step % 30 == 0:
            print(f"step {step} loss {smooth:.5f}")

    gen = torch.Generator().manual_seed(99)
    t = torch.randint(T, (500,), generator=gen)
    eps = torch.randn(500, 2, generator=gen)
    a = bar[t][:, None]
    with torch.no_grad():
        final = F.mse_loss(model.module(a.sqrt() * data[:500] + (1 - a).sqrt() * eps, t), eps)
    if rank == 0:
        print(f"final denoising error {final.item():.5f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
