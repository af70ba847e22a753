"""Plank strength from grain features: FSDP2 with layers whose rows do not divide among the workers.

The loss is a sum over known strengths (many planks were never broken), normalised by the number of
known ones in the step over all workers; FSDP's own division is turned off.  An average of the weights
is kept shard by shard.
"""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh

STEPS, BATCH, FEATURES = 32, 40, 11


def planks(n=600):
    g = torch.Generator().manual_seed(33)
    x = torch.randn(n, FEATURES, generator=g)
    y = x[:, 0] * 1.5 - x[:, 1].relu() + torch.tanh(x[:, 2] * x[:, 3]) + 0.1 * torch.randn(n, generator=g)
    known = torch.rand(n, generator=g) < 0.2 + 0.6 * (torch.arange(n) % 7 < 3)
    return x, y, known


class Strength(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(FEATURES, 37)
        self.b = nn.Linear(37, 23)
        self.gain = nn.Parameter(torch.ones(3))
        self.c = nn.Linear(23, 3)

    def forward(self, x):
        h = torch.nn.functional.silu(self.a(x))
        h = torch.nn.functional.silu(self.b(h))
        return (self.c(h) * self.gain).sum(1)


class ShardAverage:
    def __init__(self, model, decay):
        self.decay = decay
        self.shards = {n: p.detach().to_local().clone() for n, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model):
        for n, p in model.named_parameters():
            self.shards[n].lerp_(p.detach().to_local(), 1 - self.decay)

    @torch.no_grad()
    def put_into(self, model):
        for n, p in model.named_parameters():
            p.to_local().copy_(self.shards[n])


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(34)
    model = Strength()
    for layer in (model.a, model.b):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in (model.a, model.b, model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    opt = torch.optim.AdamW(model.parameters(), lr=6e-3, weight_decay=0.05)
    avg = ShardAverage(model, 0.9)
    x, y, known = planks()
    gen = torch.Generator().manual_seed(35)

    for step in range(STEPS):
        ids = torch.randperm(500, generator=gen)[:BATCH]
        mine = ids[rank * BATCH // world:(rank + 1) * BATCH // world]
        have = known[mine].float()
        count = have.sum()
        dist.all_reduce(count)
        loss = ((model(x[mine]) - y[mine]).square() * have).sum() / count
        opt.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 3.0).full_tensor()
        opt.step()
        avg.update(model)
        if step % 8 == 7:
            total = loss.detach().clone()
            dist.all_reduce(total)
            if rank == 0:
                print(f"step {step + 1} loss {total.item():.6f} norm {norm.item():.5f} known {int(count)}, "
                      f"here {int(have.sum())}", flush=True)

    avg.put_into(model)
    with torch.no_grad():
        e = (model(x[500:]) - y[500:])[rank::world].square().sum()
    dist.all_reduce(e)
    if rank == 0:
        print(f"held-out mse of the averaged weights {e.item() / 100:.6f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
