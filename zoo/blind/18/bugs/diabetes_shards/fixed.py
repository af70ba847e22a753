"""Diabetes progression, small MLP. Matrices are stored sharded and gathered on use, vectors are stored whole."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_diabetes
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

BATCH = 64
EPOCHS = 8


def start():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))


def materialize(p: DTensor) -> torch.Tensor:
    whole = p.redistribute(placements=[Replicate()]) if p.placements[0].is_shard() else p
    return whole.to_local(grad_placements=[Partial("avg")])


class Dense(nn.Module):
    def __init__(self, inputs, outputs, mesh):
        super().__init__()
        weight = torch.empty(outputs, inputs)
        nn.init.kaiming_uniform_(weight, nonlinearity="relu")
        self.weight = nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)]))
        self.bias = nn.Parameter(distribute_tensor(torch.zeros(outputs), mesh, [Replicate()]))

    def forward(self, x):
        return F.linear(x, materialize(self.weight), materialize(self.bias))


class Norm(nn.Module):
    def __init__(self, width, mesh):
        super().__init__()
        self.scale = nn.Parameter(distribute_tensor(torch.ones(width), mesh, [Replicate()]))
        self.width = width

    def forward(self, x):
        return F.rms_norm(x, (self.width,), materialize(self.scale), 1e-6)


class Net(nn.Module):
    def __init__(self, mesh, width=32):
        super().__init__()
        self.enter = Dense(10, width, mesh)
        self.norm1 = Norm(width, mesh)
        self.middle = Dense(width, width, mesh)
        self.norm2 = Norm(width, mesh)
        self.leave = Dense(width, 4, mesh)
        self.mix = nn.Parameter(distribute_tensor(torch.full((4,), 0.25), mesh, [Replicate()]))

    def forward(self, x):
        h = F.silu(self.norm1(self.enter(x)))
        h = h + F.silu(self.norm2(self.middle(h)))
        return self.leave(h) @ materialize(self.mix)


def load():
    x, y = load_diabetes(return_X_y=True)
    x = torch.tensor(x)
    x = (x - x.mean(0)) / x.std(0)
    y = torch.tensor(y)
    y = (y - y.mean()) / y.std()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(3))
    x, y = x[order], y[order]
    return x[:384], y[:384], x[384:], y[384:]


def main():
    torch.set_default_dtype(torch.float64)
    mesh = start()
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(11)
    net = Net(mesh)
    opt = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    x, y, x_test, y_test = load()
    for epoch in range(EPOCHS):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(100 + epoch))
        total = torch.zeros(())
        for first in range(0, len(x), BATCH):
            mine = order[first:first + BATCH][rank::world]
            loss = F.mse_loss(net(x[mine]), y[mine])
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.detach() * len(mine)
        dist.all_reduce(total)
        with torch.no_grad():
            test = F.mse_loss(net(x_test), y_test)
        if rank == 0:
            print(f"epoch {epoch} train {total.item() / len(x):.6f} test {test.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
