"""FSDP2 regressor whose input columns are kept inside a ball after every step (max-norm)."""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

LIMIT = 0.9


def build():
    torch.manual_seed(17)
    return nn.Sequential(
        nn.Linear(20, 64), nn.ReLU(),
        nn.Linear(64, 64), nn.ReLU(),
        nn.Linear(64, 4),
    )


def dataset():
    g = torch.Generator().manual_seed(18)
    x = torch.randn(768, 20, generator=g)
    w = torch.randn(20, 4, generator=g)
    return x, torch.sin(x @ w) * 3 + 0.05 * torch.randn(768, 4, generator=g)


@torch.no_grad()
def constrain(model):
    for m in model:
        if isinstance(m, nn.Linear):
            w = m.weight.to_local()
            norm = w.norm(dim=0, keepdim=True)
            w.mul_(LIMIT / norm.clamp(min=LIMIT))


def run(rank, world, epochs=4, batch=64):
    mesh = init_device_mesh("cpu", (world,))
    model = build()
    for m in model:
        if isinstance(m, nn.Linear):
            fully_shard(m, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    x, y = dataset()
    for epoch in range(epochs):
        perm = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        total = torch.zeros(())
        for ids in perm.split(batch):
            ids = ids[rank::world]
            loss = (model(x[ids]) - y[ids]).pow(2).mean()
            loss.backward()
            opt.step()
            opt.zero_grad()
            constrain(model)
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: mse {total.item() * batch / len(x) / world:.5f}", flush=True)
    return model


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29577")
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    model = run(rank, world)
    size = sum(p.full_tensor().pow(2).sum().item() for p in model.parameters()) ** 0.5
    if rank == 0:
        print(f"weights {size:.5f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()
