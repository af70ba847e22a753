"""Low-rank adapters on a frozen network under HSDP (FSDP2 on a two-dimensional mesh).

Adapts a network for clean digits to digits in other positions. Micro-batches are accumulated
without reduction; half-way the job writes a distributed checkpoint (adapters and their
optimizer only), builds everything anew and goes on from the files.
"""
import os
import shutil
import tempfile

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_model_state_dict, get_optimizer_state_dict,
                                                     set_model_state_dict, set_optimizer_state_dict)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

WIDTH, RANK_R, BATCH, MICRO, STEPS, HALF = 48, 4, 64, 16, 24, 12
ADAPTERS = StateDictOptions(ignore_frozen_params=True, strict=False)


class Adapted(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(RANK_R, base.in_features) / base.in_features ** 0.5)
        self.b = nn.Parameter(torch.zeros(base.out_features, RANK_R))

    def forward(self, x):
        return self.base(x) + 2.0 * F.linear(F.linear(x, self.a), self.b)


def base_network(x, y):
    """Stands for a downloaded checkpoint: a few steps, the same on every process."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 10))
    optimizer = torch.optim.SGD(net.parameters(), 0.5)
    for step in range(12):
        optimizer.zero_grad()
        F.cross_entropy(net(x[step * 64:][:64]), y[step * 64:][:64]).backward()
        optimizer.step()
    return net


def build(base, mesh, seed):
    torch.manual_seed(seed)
    base = {k: v.clone() for k, v in base.state_dict().items()}
    net = nn.Sequential(nn.Linear(64, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 10))
    net.load_state_dict(base)
    for i in (0, 2, 4):
        net[i] = Adapted(net[i])
        fully_shard(net[i], mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net, torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.01, weight_decay=0.01)


def train(net, optimizer, x, y, steps, rank, world):
    for step in steps:
        rows = torch.randperm(len(x), generator=torch.Generator().manual_seed(step))[:BATCH]
        parts = rows[rank::world].split(MICRO)
        seen = torch.zeros(1)
        for i, part in enumerate(parts, 1):
            net.set_requires_gradient_sync(i == len(parts))
            loss = F.cross_entropy(net(x[part]), y[part]) / len(parts)
            loss.backward()
            seen += loss.detach()
        norm = nn.utils.clip_grad_norm_([p for p in net.parameters() if p.requires_grad], 0.5).full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        if step % 6 == 5:
            dist.all_reduce(seen)
            if rank == 0:
                print(f"step {step + 1}: loss {seen.item() / world:.4f}, norm {norm.item():.4f}")


def main():
    for k, v in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29628"}.items():
        os.environ.setdefault(k, v)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    copies = min(2, world)
    mesh = init_device_mesh("cpu", (copies, world // copies), mesh_dim_names=("copies", "shards"))

    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(2).permutation(len(x))
    x, y = torch.tensor(x[order], dtype=torch.float32) / 16, torch.tensor(y[order])
    base = base_network(x, y)
    moved = x.view(-1, 8, 8).roll((1, -1), (1, 2)).reshape(-1, 64)
    xs, ys, xt, yt = moved[800:1500], y[800:1500], moved[1500:], y[1500:]

    folder = [tempfile.mkdtemp(prefix="lora-") if rank == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    net, optimizer = build(base, mesh, seed=7)
    train(net, optimizer, xs, ys, range(HALF), rank, world)
    dcp.save({"net": get_model_state_dict(net, options=ADAPTERS),
              "optimizer": get_optimizer_state_dict(net, optimizer, options=ADAPTERS)}, checkpoint_id=folder[0])
    del net, optimizer

    net, optimizer = build(base, mesh, seed=12345)              # "second job"
    state = {"net": get_model_state_dict(net, options=ADAPTERS),
             "optimizer": get_optimizer_state_dict(net, optimizer, options=ADAPTERS)}
    dcp.load(state, checkpoint_id=folder[0])
    set_model_state_dict(net, state["net"], options=ADAPTERS)
    set_optimizer_state_dict(net, optimizer, state["optimizer"], options=ADAPTERS)
    train(net, optimizer, xs, ys, range(HALF, STEPS), rank, world)

    with torch.no_grad():                                       # every process scores all: forward is a collective
        right = (net(xt).argmax(1) == yt).sum().item()
    if rank == 0:
        print(f"moved digits: {right} of {len(xt)} right")
        shutil.rmtree(folder[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
