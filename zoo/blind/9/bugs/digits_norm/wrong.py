"""Digits with a batch norm whose statistics go over all processes (gloo has no SyncBatchNorm)."""
import os
import time

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dnn
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP


class CrossBatchNorm(nn.Module):
    def __init__(self, features, momentum=0.1, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))
        self.bias = nn.Parameter(torch.zeros(features))
        self.register_buffer("running_mean", torch.zeros(features))
        self.register_buffer("running_var", torch.ones(features))
        self.momentum, self.eps = momentum, eps

    def forward(self, x):
        if self.training:
            world = dist.get_world_size()
            mean = dnn.all_reduce(x.mean(0)) / world
            var = dnn.all_reduce(x.var(0, unbiased=False)) / world
            with torch.no_grad():
                self.running_mean.lerp_(mean, self.momentum)
                self.running_var.lerp_(var, self.momentum)
        else:
            mean, var = self.running_mean, self.running_var
        return (x - mean) * torch.rsqrt(var + self.eps) * self.weight + self.bias


def build():
    return nn.Sequential(
        nn.Linear(64, 48, bias=False), CrossBatchNorm(48), nn.ReLU(),
        nn.Linear(48, 32, bias=False), CrossBatchNorm(32), nn.ReLU(),
        nn.Linear(32, 10),
    )


def main():
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29881")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    d = load_digits()
    x, y = torch.tensor(d.data, dtype=torch.float32) / 16, torch.tensor(d.target)
    torch.manual_seed(12)
    model = DDP(build(), broadcast_buffers=False)
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    gen = torch.Generator().manual_seed(1)
    for epoch in range(2):
        model.train()
        perm = torch.randperm(1536, generator=gen)
        for chunk in perm.split(32):
            rows = chunk[rank::world]
            loss = F.cross_entropy(model(x[rows]), y[rows])
            opt.zero_grad()
            loss.backward()
            opt.step()
        model.eval()
        with torch.no_grad():
            out = model(x[1536:])
        if rank == 0:
            print(f"epoch {epoch} held-out loss {F.cross_entropy(out, y[1536:]).item():.5f} "
                  f"accuracy {(out.argmax(1) == y[1536:]).float().mean().item():.4f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
