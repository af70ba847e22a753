"""Tabular regression, fully sharded (FSDP), gradients clipped by their norm."""
import functools
import os
import time
import warnings

import torch
import torch.distributed as dist
from sklearn.datasets import make_regression
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

warnings.filterwarnings("ignore")
BATCH, EPOCHS, CLIP = 64, 4, 0.3


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def build(width=32):
    return nn.Sequential(nn.Linear(20, width), Block(width), Block(width), nn.Linear(width, 1))


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()

    x, y = make_regression(n_samples=512, n_features=20, n_informative=12, noise=4.0, random_state=8)
    x, y = torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32)
    y = (y - y.mean()) / y.std()

    torch.manual_seed(3)
    strategy = ShardingStrategy.FULL_SHARD if world > 1 else ShardingStrategy.NO_SHARD
    model = FSDP(build(), auto_wrap_policy=ModuleWrapPolicy({Block}), sharding_strategy=strategy,
                 device_id=torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss_of = functools.partial(torch.nn.functional.mse_loss, reduction="mean")

    for epoch in range(EPOCHS):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        total = torch.zeros(())
        for rows in order.split(BATCH):
            mine = rows[rank::world]
            optimizer.zero_grad()
            loss = loss_of(model(x[mine]).squeeze(1), y[mine])
            loss.backward()
            model.clip_grad_norm_(CLIP)
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}  mse {total.item() / world / (len(x) // BATCH):.5f}")

    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
