"""Four outputs from twelve sensors; the averaged weights are what is deployed.

First job: train under fully_shard, keep an exponential average, write model and average with
torch.distributed.checkpoint. Second job: a fresh model, read both, score the average.
"""
import os
import tempfile
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard

DECAY = 0.9


def build(seed):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 4))
    for layer in net[::2]:
        fully_shard(layer)
    fully_shard(net)
    return net


def values(p):
    return p.detach().to_local()


class Average:
    def __init__(self, net):
        self.shadow = {n: values(p).clone() for n, p in net.named_parameters()}

    def update(self, net):
        for n, p in net.named_parameters():
            self.shadow[n].mul_(DECAY).add_(values(p), alpha=1 - DECAY)

    def put_into(self, net):
        for n, p in net.named_parameters():
            values(p).copy_(self.shadow[n])


def make_data():
    g = torch.Generator().manual_seed(1)
    x = torch.randn(640, 12, generator=g, dtype=torch.float64)
    mix = torch.randn(12, 4, generator=g, dtype=torch.float64)
    return x, torch.sin(x @ mix / 3) + 0.05 * torch.randn(640, 4, generator=g, dtype=torch.float64)


def score(net, x, y):
    with torch.no_grad():
        return ((net(x) - y) ** 2).mean().item()


def first_job(folder, x, y, rank, world):
    net = build(seed=0)
    average = Average(net)
    opt = torch.optim.Adam(net.parameters(), lr=0.01)
    for epoch in range(4):
        for rows in torch.arange(512).split(64):
            mine = rows[rank::world]
            loss = ((net(x[mine]) - y[mine]) ** 2).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            average.update(net)
    last = score(net, x[512:], y[512:])
    if rank == 0:
        print(f"last weights {last:.6f}")
    dcp.save({"model": net.state_dict(), "average": average.shadow}, checkpoint_id=folder)


def second_job(folder, x, y, rank):
    net = build(seed=1)
    average = Average(net)
    state = {"model": net.state_dict(), "average": average.shadow}
    dcp.load(state, checkpoint_id=folder)
    net.load_state_dict(state["model"])
    last = score(net, x[512:], y[512:])
    average.put_into(net)
    mean = score(net, x[512:], y[512:])
    if rank == 0:
        print(f"read: last weights {last:.6f}, average {mean:.6f}")


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    where = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(where, src=0)
    x, y = make_data()
    first_job(where[0], x, y, dist.get_rank(), dist.get_world_size())
    second_job(where[0], x, y, dist.get_rank())
    time.sleep(0.3)
    dist.destroy_process_group()
