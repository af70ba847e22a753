"""FSDP (the first one), its own clipping, and sums that are scaled to a mean."""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import make_classification
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return x + self.b(torch.tanh(self.a(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.mid = nn.Sequential(Residual(32), Residual(32))
        self.last = nn.Linear(32, 3)

    def forward(self, x):
        return self.last(self.mid(self.first(x)))


def main():
    for key, value in dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="30029").items():
        os.environ.setdefault(key, value)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = make_classification(1536, 16, n_informative=10, n_classes=3, random_state=12)
    x, y = torch.tensor(x, dtype=torch.float32), torch.tensor(y)
    torch.manual_seed(4)
    model = FSDP(
        Net(),
        auto_wrap_policy=ModuleWrapPolicy({Residual}),
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for epoch in range(2):
        perm = torch.randperm(1280, generator=torch.Generator().manual_seed(epoch))
        stats = torch.zeros(2)
        for block in perm.split(64):
            rows = block[rank::world]
            loss = F.cross_entropy(model(x[rows]), y[rows], reduction="sum") * world / len(block)
            opt.zero_grad()
            loss.backward()
            norm = model.clip_grad_norm_(0.7)
            opt.step()
            stats += torch.stack([loss.detach(), norm / 1.0])
        dist.all_reduce(stats)
        stats /= world * 20
        with torch.no_grad():
            out = model(x[1280:])
        if rank == 0:
            print(f"epoch {epoch} loss {stats[0]:.5f} norm {stats[1]:.5f} test {F.cross_entropy(out, y[1280:]).item():.5f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
