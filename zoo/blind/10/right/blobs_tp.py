"""Tensor parallel MLP with DTensor on blobs."""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import make_blobs
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

BATCH, STEPS, CLASSES = 40, 60, 6


class FeedForward(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x):
        return x + self.down(F.silu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(3, 16)
        self.ff1 = FeedForward(16, 48)
        self.ff2 = FeedForward(16, 48)
        self.out = nn.Linear(16, CLASSES)

    def forward(self, x):
        return self.out(self.ff2(self.ff1(self.inp(x))))


def main():
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29810")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))

    torch.manual_seed(700 + rank)
    net = Net()
    plan = {}
    for name in ("ff1", "ff2"):
        plan[f"{name}.up"] = ColwiseParallel()
        plan[f"{name}.down"] = RowwiseParallel()
    parallelize_module(net, mesh, plan)
    # what is not in the plan comes from the first process; the shards were cut from its weights
    with torch.no_grad():
        for p in net.parameters():
            if not isinstance(p, DTensor):
                dist.broadcast(p, 0)

    x, y = make_blobs(1500, n_features=3, centers=CLASSES, cluster_std=2.0, random_state=2)
    x, y = torch.tensor(x, dtype=torch.float32) / 8, torch.tensor(y)
    split = [p for p in net.parameters() if isinstance(p, DTensor)]
    plain = [p for p in net.parameters() if not isinstance(p, DTensor)]
    opt = torch.optim.Adam([{"params": split, "lr": 3e-3}, {"params": plain, "lr": 1e-3}], foreach=False)
    order = torch.Generator().manual_seed(55)
    for step in range(1, STEPS + 1):
        rows = torch.randint(len(x), (BATCH,), generator=order)
        loss = F.cross_entropy(net(x[rows]), y[rows])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if rank == 0 and step % 15 == 0:
            print(f"step {step}: loss {loss.item():.5f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
