"""Mixture of experts, the experts spread over the processes; rows are split over the same processes."""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import make_blobs

EXPERTS, BATCH, WIDTH = 4, 64, 16


class Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, local):
        parts = [torch.empty_like(local) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, local.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


class Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, partial):
        total = partial.clone()
        dist.all_reduce(total)
        return total.chunk(dist.get_world_size())[dist.get_rank()]

    @staticmethod
    def backward(ctx, grad):
        parts = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, grad.contiguous())
        return torch.cat(parts)


class MoE(nn.Module):
    def __init__(self, rank, world):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        made = [nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)) for _ in range(EXPERTS)]
        self.first = rank * EXPERTS // world
        self.experts = nn.ModuleList(made[self.first:(rank + 1) * EXPERTS // world])

    def forward(self, h):
        gates = Dispatch.apply(self.router(h).softmax(1))
        rows = Dispatch.apply(h)
        out = sum(gates[:, self.first + k, None] * e(rows) for k, e in enumerate(self.experts))
        return Combine.apply(out)


class Net(nn.Module):
    def __init__(self, rank, world):
        super().__init__()
        self.embed = nn.Linear(6, WIDTH)
        self.head = nn.Linear(WIDTH, 8)
        self.moe = MoE(rank, world)

    def forward(self, x):
        h = torch.tanh(self.embed(x))
        return self.head(h + self.moe(h))


def sync_gradients(net, world):
    for name, p in net.named_parameters():
        if ".experts." not in name:
            dist.all_reduce(p.grad)
        p.grad /= world


def main():
    torch.set_default_dtype(torch.float64)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = make_blobs(1024, n_features=6, centers=8, cluster_std=3.0, random_state=3)
    x, y = torch.tensor(x) / 5, torch.tensor(y)
    torch.manual_seed(10)
    net = Net(rank, world)
    opt = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
    for epoch in range(2):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        seen = torch.zeros(())
        for rows in order.split(BATCH):
            rows = rows.chunk(world)[rank]
            loss = nn.functional.cross_entropy(net(x[rows]), y[rows])
            opt.zero_grad()
            loss.backward()
            sync_gradients(net, world)
            opt.step()
            seen += loss.detach() * len(rows)
        dist.all_reduce(seen)
        if rank == 0:
            print(f"epoch {epoch} loss {seen.item() / len(x):.7f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
