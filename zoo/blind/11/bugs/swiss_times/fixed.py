import math
import os
import time

import torch
import torch.distributed as dist
from sklearn.datasets import make_swiss_roll
from torch import nn

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29812")

BATCH, STEPS = 32, 150


class Denoiser(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.first = nn.Linear(2 + 4, width)
        self.second = nn.Linear(width, width)
        self.last = nn.Linear(width, 2)

    def forward(self, x, t):
        angle = t * math.pi / 2
        when = torch.cat([angle.sin(), angle.cos(), (4 * angle).sin(), (4 * angle).cos()], 1)
        h = torch.relu(self.first(torch.cat([x, when], 1)))
        return self.last(torch.relu(self.second(h)))


def spread_times(rows, world, shift):
    """Evenly spread times in [0, 1) with a common random shift: less noise than independent ones."""
    grid = rows / (len(rows) * world)
    return ((grid + shift) % 1).unsqueeze(1)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    points = make_swiss_roll(2000, noise=0.1, random_state=1)[0][:, [0, 2]]
    points = torch.tensor(points, dtype=torch.float32) / 8
    torch.manual_seed(31)
    net = Denoiser()
    ddp = nn.parallel.DistributedDataParallel(net)
    opt = torch.optim.AdamW(ddp.parameters(), lr=4e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, STEPS)
    ema = [p.detach().clone() for p in net.parameters()]
    own = torch.arange(rank, BATCH, world)
    gen = torch.Generator().manual_seed(5)
    seen = torch.zeros(())
    for step in range(STEPS):
        which = torch.randint(len(points), (BATCH,), generator=gen)[own]
        noise = torch.randn(BATCH, 2, generator=gen)[own]
        shift = torch.rand((), generator=gen)
        t = spread_times(own, world, shift)
        angle = t * math.pi / 2
        x = angle.cos() * points[which] + angle.sin() * noise
        loss = (ddp(x, t) - noise).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        torch._foreach_lerp_(ema, list(net.parameters()), 0.05)
        seen += loss.detach() / world
        if step % 30 == 29:
            dist.all_reduce(seen)
            if rank == 0:
                print(f"step {step + 1:3d}  loss {seen.item() / 30:.5f}", flush=True)
            seen.zero_()
    if rank == 0:
        print("average of the weights:", f"{sum(p.abs().sum() for p in ema).item():.4f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
