import math
import os
import time
import warnings

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import make_swiss_roll
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy

warnings.filterwarnings("ignore")
os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29842")


class Fourier(nn.Module):
    """Fixed random waves, never trained and left out of the sharding."""

    def __init__(self, n_in, n_out, seed):
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        self.waves = nn.Parameter(torch.randn(n_in, n_out, generator=g), requires_grad=False)
        self.shift = nn.Parameter(2 * math.pi * torch.rand(n_out, generator=g), requires_grad=False)

    def forward(self, x):
        return torch.cos(x @ self.waves + self.shift)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.fourier = Fourier(3, 64, seed=4)
        self.mix = nn.Linear(64, 32)
        self.out = nn.Linear(32, 1)

    def forward(self, x):
        return self.out(torch.relu(self.mix(self.fourier(x)))).squeeze(1)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, t = make_swiss_roll(1024, noise=0.2, random_state=5)
    x = torch.tensor((x - x.mean(0)) / x.std(0), dtype=torch.float32)
    t = torch.tensor((t - t.mean()) / t.std(), dtype=torch.float32)
    torch.manual_seed(90 + rank)
    net = Model()
    for p in list(net.mix.parameters()) + list(net.out.parameters()):
        dist.broadcast(p.detach(), src=0)
    model = FSDP(net, ignored_modules=[net.fourier], device_id=torch.device("cpu"),
                 sharding_strategy=ShardingStrategy.FULL_SHARD)
    opt = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.03, momentum=0.9)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.06, total_steps=96, cycle_momentum=False)
    for epoch in range(6):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        total = 0.0
        for rows in order.view(-1, 64):
            mine = rows.view(world, -1)[rank]
            loss = (model(x[mine]) - t[mine]).abs().mean()
            opt.zero_grad()
            loss.backward()
            model.clip_grad_norm_(1.0)
            opt.step()
            sched.step()
            total += loss.item()
        totals = [None] * world
        dist.all_gather_object(totals, total)
        if rank == 0:
            print(f"epoch {epoch}: error {sum(totals) / world / 16:.5f}, lr {sched.get_last_lr()[0]:.5f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
