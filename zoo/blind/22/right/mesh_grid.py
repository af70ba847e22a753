"""Friedman regression on a two-dimensional device mesh: data parallel x tensor parallel (DTensor)."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import make_friedman1
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

BATCH = 64


class FeedForward(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.w1 = nn.Linear(width, hidden)
        self.w2 = nn.Linear(hidden, width)

    def forward(self, x):
        return x + self.w2(F.silu(self.w1(self.norm(x))))


class Regressor(nn.Module):
    def __init__(self, features, width=32, hidden=96, depth=2):
        super().__init__()
        self.stem = nn.Linear(features, width)
        self.layers = nn.ModuleList(FeedForward(width, hidden) for _ in range(depth))
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        h = self.stem(x)
        for layer in self.layers:
            h = layer(h)
        return self.head(h).squeeze(-1)


def local(t):
    return t.to_local() if isinstance(t, DTensor) else t


@torch.no_grad()
def average_over(group, params):
    for p in params:
        g = local(p.grad)
        dist.all_reduce(g, group=group)
        g.div_(dist.get_world_size(group))


@torch.no_grad()
def clip(params, limit):
    squares = []
    for p in params:
        g = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        squares.append(g.square().sum())
    norm = torch.stack(squares).sum().sqrt()
    factor = torch.clamp(limit / (norm + 1e-6), max=1.0).item()
    for p in params:
        local(p.grad).mul_(factor)
    return norm.item()


def main():
    torch.set_default_dtype(torch.float64)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    world = dist.get_world_size()
    tensor_size = 2 if world % 2 == 0 else 1
    mesh = init_device_mesh("cpu", (world // tensor_size, tensor_size), mesh_dim_names=("data", "tensor"))
    data_group = mesh.get_group("data")
    part, parts = mesh.get_local_rank("data"), mesh.size(0)

    x, y = make_friedman1(n_samples=1280, n_features=10, noise=0.3, random_state=8)
    x = torch.tensor(x, dtype=torch.float64)
    y = torch.tensor((y - y.mean()) / y.std(), dtype=torch.float64)
    train_x, train_y, test_x, test_y = x[:1024], y[:1024], x[1024:], y[1024:]

    torch.manual_seed(2)
    model = Regressor(10)
    for layer in model.layers:
        parallelize_module(layer, mesh["tensor"], {"w1": ColwiseParallel(), "w2": RowwiseParallel()})
    params = list(model.parameters())
    opt = torch.optim.AdamW(params, lr=3e-3, foreach=False)

    shuffle = torch.Generator().manual_seed(31)
    for epoch in range(4):
        perm = torch.randperm(len(train_x), generator=shuffle)
        for rows in perm.split(BATCH):
            mine = rows.chunk(parts)[part]
            loss = F.huber_loss(model(train_x[mine]), train_y[mine])
            opt.zero_grad()
            loss.backward()
            average_over(data_group, params)
            norm = clip(params, 0.5)
            opt.step()
        with torch.no_grad():
            error = (model(test_x) - test_y).square().mean()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} last norm {norm:.4f} test mse {error.item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
