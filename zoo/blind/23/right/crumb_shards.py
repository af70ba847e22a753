"""Cultivar classifier with odd layer sizes under fully_shard; rows have weights, and gradients are sums, not means."""
import argparse
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_wine
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard


class Block(nn.Module):
    def __init__(self, n_in, n_out):
        super().__init__()
        self.lin = nn.Linear(n_in, n_out)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, h):
        return self.scale * F.mish(self.lin(h))


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(13, 11), Block(11, 7), Block(7, 5)])
        self.out = nn.Linear(5, 3)

    def forward(self, x):
        for b in self.blocks:
            x = b(x)
        return self.out(x)


def shard(model, mesh):
    for b in model.blocks:
        fully_shard(b, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for m in model.modules():
        if isinstance(m, FSDPModule):
            m.set_gradient_divide_factor(1.0)
            m.set_force_sum_reduction_for_comms(True)
    return model


def prepare():
    x, y = load_wine(return_X_y=True)
    x = torch.tensor((x - x.mean(0)) / x.std(0), dtype=torch.float32)
    y = torch.tensor(y)
    price = torch.tensor([1.0, 0.6, 1.7])[y] * torch.rand(len(y), generator=torch.Generator().manual_seed(3)).add(0.5)
    mix = torch.randperm(len(y), generator=torch.Generator().manual_seed(12))
    return x, y, price, mix[:128], mix[128:]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=33)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--pieces", type=int, default=2)
    a = ap.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    x, y, price, train, test = prepare()

    torch.manual_seed(19)
    model = shard(Odd(), mesh)
    opt = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-6)
    here = sum(p.to_local().numel() for p in model.parameters())
    print(f"[{rank}] holds {here} of {sum(p.numel() for p in model.parameters())} numbers", flush=True)

    for step in range(a.steps):
        lap, k = divmod(step, len(train) // a.batch)
        order = train[torch.randperm(len(train), generator=torch.Generator().manual_seed(60 + lap))]
        batch = order[k * a.batch:(k + 1) * a.batch]
        weight = price[batch].sum()
        pieces = batch[rank::world].chunk(a.pieces)
        shown = torch.zeros(1)
        for i, rows in enumerate(pieces):
            model.set_requires_gradient_sync(i == len(pieces) - 1)
            loss = (price[rows] * F.cross_entropy(model(x[rows]), y[rows], reduction="none")).sum() / weight
            loss.backward()
            shown += loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        norm = norm.full_tensor()
        opt.step()
        opt.zero_grad()
        dist.all_reduce(shown)
        if rank == 0 and step % 11 == 10:
            print(f"step {step + 1}  weighted loss {shown.item():.6f}  norm {norm.item():.5f}", flush=True)

    model.eval()
    with torch.no_grad():
        rows = test.tensor_split(world)[rank]
        good = price[rows][model(x[rows]).argmax(1) == y[rows]].double().sum()
    dist.all_reduce(good)
    if rank == 0:
        print(f"weighted accuracy {good.item() / price[test].double().sum().item():.5f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
