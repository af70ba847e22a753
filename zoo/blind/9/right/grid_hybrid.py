"""Hybrid sharding on a two-dimensional mesh: replicas of shards, with accumulation."""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

GLOBAL, PARTS, STEPS = 64, 2, 40


def setup():
    for k, v in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29713")):
        os.environ.setdefault(k, v)
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    replicas = 2 if world % 2 == 0 else 1
    return init_device_mesh("cpu", (replicas, world // replicas), mesh_dim_names=("replicate", "shard"))


def build():
    torch.manual_seed(71)
    return nn.Sequential(nn.Linear(64, 72), nn.ReLU(), nn.Linear(72, 36), nn.ReLU(), nn.Linear(36, 10))


def main():
    mesh = setup()
    rank, world = dist.get_rank(), dist.get_world_size()
    d = load_digits()
    x, y = torch.tensor(d.data, dtype=torch.float32) / 16, torch.tensor(d.target)
    model = build()
    fully_shard(model[0], mesh=mesh)
    fully_shard(model[2], mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    for step in range(STEPS):
        perm = torch.randperm(1536, generator=torch.Generator().manual_seed(step))[:GLOBAL]
        mine = perm[rank::world]
        opt.zero_grad()
        for part, rows in enumerate(mine.chunk(PARTS)):
            model.set_requires_gradient_sync(part == PARTS - 1)
            loss = F.cross_entropy(model(x[rows]), y[rows]) / PARTS
            loss.backward()
        opt.step()
        if step % 10 == 9:
            with torch.no_grad():
                test = F.cross_entropy(model(x[1536:]), y[1536:]).item()
            if rank == 0:
                print(f"step {step + 1} test {test:.5f}")

    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
