"""Friedman's regression with DTensor: replicated weights, every process holds a part of the batch."""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import make_friedman1
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module

BATCH, STEPS = 64, 100


def data():
    x, y = make_friedman1(2048, n_features=8, noise=0.3, random_state=4)
    x = torch.tensor(x, dtype=torch.float32)
    y = torch.tensor(y, dtype=torch.float32).unsqueeze(1)
    return x - 0.5, (y - y.mean()) / y.std()


class Regressor(nn.Module):
    def __init__(self, features, width=32):
        super().__init__()
        self.first = nn.Linear(features, width)
        self.second = nn.Linear(width, width)
        self.last = nn.Linear(width, 1)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        x = torch.tanh(self.second(x))
        return self.last(x)


def batch_as_dtensor(mesh, *tensors):
    return [DTensor.from_local(t, mesh, [Shard(0)], run_check=False) for t in tensors]


def finish_gradients(model):
    for p in model.parameters():
        if isinstance(p.grad, DTensor):
            p.grad = p.grad.redistribute(placements=[Replicate()])


def main():
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29713")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("data",))

    x, y = data()
    torch.manual_seed(10)
    model = distribute_module(Regressor(x.shape[1]), mesh)
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    order = torch.Generator().manual_seed(60)

    for step in range(1, STEPS + 1):
        rows = torch.randperm(len(x), generator=order)[:BATCH].chunk(world)[rank]
        inputs, targets = batch_as_dtensor(mesh, x[rows], y[rows])
        loss = (model(inputs) - targets).square().mean()
        opt.zero_grad()
        loss.backward()
        finish_gradients(model)
        opt.step()
        if step % 20 == 0:
            whole = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
            with torch.no_grad():
                error = (model(whole).to_local() - y).square().mean().item()
            if rank == 0:
                print(f"step {step}: error {error:.6f}", flush=True)

    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
