"""FSDP (the first one) with accumulation; every process sees a different number of rows per micro-batch."""
import os
import time
import warnings
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import make_friedman3
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

warnings.filterwarnings("ignore")
WINDOW, STEPS = 96, 40
CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc1 = nn.Linear(width, width)
        self.fc2 = nn.Linear(width, width)

    def forward(self, x):
        return x + self.fc2(torch.tanh(self.fc1(x)))


class Net(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.inp = nn.Linear(4, width)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        return self.out(self.blocks(torch.tanh(self.inp(x)))).squeeze(1)


def parts(rows, rank, world):
    """Two micro-batches of 2:1, cut out of what is ours."""
    mine = rows.chunk(world)[rank]
    cut = 2 * len(mine) // 3
    return mine[:cut], mine[cut:]


def main():
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29820")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = make_friedman3(1500, noise=0.02, random_state=5)
    x, y = torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32)
    x = (x - x.mean(0)) / x.std(0)
    torch.manual_seed(60 + rank)
    net = Net()
    for p in net.parameters():
        dist.broadcast(p.data, 0)
    model = FSDP(net, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=CPU, use_orig_params=True,
                 sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    opt = torch.optim.Adam(model.parameters(), lr=4e-3)
    order = torch.Generator().manual_seed(9)
    for step in range(1, STEPS + 1):
        rows = torch.randint(len(x), (WINDOW,), generator=order)
        spent = torch.zeros(())
        opt.zero_grad()
        both = parts(rows, rank, world)
        for k, part in enumerate(both):
            with model.no_sync() if k + 1 < len(both) else nullcontext():
                loss = (model(x[part]) - y[part]).square().sum() / len(rows) * world
                loss.backward()
            spent += loss.detach() / world
        opt.step()
        dist.all_reduce(spent)
        if rank == 0 and step % 10 == 0:
            print(f"step {step}: loss {spent.item():.6f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
