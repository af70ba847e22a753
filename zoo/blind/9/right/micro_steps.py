"""Gradient accumulation in fixed micro-batches of 8 rows; fewer of them with more processes."""
import copy
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import make_circles
from torch.nn.parallel import DistributedDataParallel as DDP

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29944")

MICRO, GLOBAL, STEPS = 8, 64, 80


class Ema:
    def __init__(self, module, decay):
        self.shadow, self.decay = copy.deepcopy(module), decay

    @torch.no_grad()
    def update(self, module):
        for s, p in zip(self.shadow.parameters(), module.parameters()):
            s.lerp_(p, 1 - self.decay)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    accumulate = GLOBAL // (MICRO * world)
    x, y = make_circles(1024, noise=0.12, factor=0.5, random_state=1)
    x, y = torch.tensor(x, dtype=torch.float32), torch.tensor(y)
    torch.manual_seed(14)
    model = DDP(nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2)))
    ema = Ema(model.module, 0.95)
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=2e-2, total_steps=STEPS)
    gen = torch.Generator().manual_seed(15)

    opt.zero_grad()
    micro = 0
    while micro < STEPS * accumulate:
        if micro % accumulate == 0:
            window = torch.randperm(len(x), generator=gen)[:GLOBAL].view(world, accumulate, MICRO)[rank]
        rows = window[micro % accumulate]
        # gradients are synchronised in every micro-batch: slower, same result
        loss = F.cross_entropy(model(x[rows]), y[rows]) / accumulate
        loss.backward()
        micro += 1
        if micro % accumulate == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            sched.step()
            opt.zero_grad()
            ema.update(model.module)
            step = micro // accumulate
            if step % 20 == 0 and rank == 0:
                with torch.no_grad():
                    now = F.cross_entropy(model.module(x), y).item()
                    smooth = F.cross_entropy(ema.shadow(x), y).item()
                print(f"step {step} loss {now:.5f} averaged weights {smooth:.5f}")

    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
