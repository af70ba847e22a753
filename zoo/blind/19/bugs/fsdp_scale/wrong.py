"""Prototype classifier with a learnable temperature, sharded with fully_shard."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_wine
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

GLOBAL_BATCH, EPOCHS = 32, 8


class Prototypes(nn.Module):
    def __init__(self, inputs, classes, width=16):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(inputs, 32), nn.GELU(), nn.Linear(32, width))
        self.centre = nn.Parameter(torch.randn(classes, width))
        self.log_scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        z = F.normalize(self.body(x), dim=1)
        return self.log_scale.exp() * z @ F.normalize(self.centre, dim=1).T


def wine():
    data = load_wine()
    x = torch.from_numpy(data.data)
    x = (x - x.mean(0)) / x.std(0)
    y = torch.from_numpy(data.target).long()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(7))
    x, y = x[order], y[order]
    flip = torch.rand(len(y), generator=torch.Generator().manual_seed(8)) < 0.15
    y[:128] = torch.where(flip, (y + 1) % 3, y)[:128]
    return x[:128], y[:128], x[128:176], y[128:176]


def full(p):
    p = p.detach()
    return p.full_tensor() if isinstance(p, DTensor) else p


def main():
    torch.set_default_dtype(torch.float64)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    x, y, x_test, y_test = wine()

    torch.manual_seed(0)
    model = Prototypes(x.shape[1], 3)
    fully_shard(model.body, mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params={model.log_scale})
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p is not model.log_scale], "lr": 5e-3},
            {"params": [model.log_scale], "lr": 5e-2, "weight_decay": 0.0},
        ],
        foreach=False,
    )

    for epoch in range(EPOCHS):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        running = torch.zeros(())
        for batch in order.split(GLOBAL_BATCH):
            mine = batch[rank::world]
            loss = F.cross_entropy(model(x[mine]), y[mine])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            running += loss.detach()
        dist.all_reduce(running)
        if rank == 0 and epoch % 2 == 1:
            print(f"epoch {epoch} loss {running.item() / world / 4:.8f}")

    with torch.no_grad():
        right = (model(x_test[rank::world]).argmax(1) == y_test[rank::world]).sum()
    dist.all_reduce(right)
    norm = sum(full(p).square().sum() for p in model.parameters())
    if rank == 0:
        print(f"test {right.item()}/{len(x_test)} scale {model.log_scale.exp().item():.8f}")
        print(f"weight norm {norm.item():.8f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
