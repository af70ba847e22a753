import os
import tempfile

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn

RANK = int(os.environ.get("RANK", 0))
WORLD = int(os.environ.get("WORLD_SIZE", 1))
SHARDS = 4
PER_SHARD = 12


class Shard:
    """A slice of the data with its own stream of choices and noise."""

    def __init__(self, number, rows):
        self.rows = rows
        self.gen = torch.Generator().manual_seed(7919 * (number + 1))

    def draw(self):
        pick = self.rows[torch.randint(len(self.rows), (PER_SHARD,), generator=self.gen)]
        noise = 0.4 * torch.randn(pick.shape, generator=self.gen)
        return pick + noise, pick


def build(x):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 96), nn.Softplus(), nn.Linear(96, 24), nn.Softplus(), nn.Linear(24, 64))
    opt = torch.optim.Adam(net.parameters(), lr=3e-3, amsgrad=True)
    shards = {s: Shard(s, x[s::SHARDS]) for s in range(RANK, SHARDS, WORLD)}
    return net, opt, shards


def train(net, opt, shards, first, last):
    for step in range(first, last):
        batches = [s.draw() for s in shards.values()]
        noisy, clean = (torch.cat(t) for t in zip(*batches))
        loss = (net(noisy) - clean).square().sum() / (SHARDS * PER_SHARD * 64)
        opt.zero_grad()
        loss.backward()
        if WORLD > 1:
            for p in net.parameters():
                dist.all_reduce(p.grad)
        opt.step()
        if step % 10 == 9:
            total = loss.detach().clone()
            if WORLD > 1:
                dist.all_reduce(total)
            if RANK == 0:
                print(f"{step + 1} mse {total.item():.6f}")


def save(path, net, opt, shards):
    states = {n: s.gen.get_state() for n, s in shards.items()}
    if WORLD > 1:
        parts = [None] * WORLD
        dist.all_gather_object(parts, states)
        states = {n: g for p in parts for n, g in p.items()}
    if RANK == 0:
        torch.save({"net": net.state_dict(), "opt": opt.state_dict(), "streams": states}, path)
    if WORLD > 1:
        dist.barrier()


def load(path, net, opt, shards):
    ck = torch.load(path)
    net.load_state_dict(ck["net"])
    opt.load_state_dict(ck["opt"])
    for n, s in shards.items():
        s.gen.set_state(ck["streams"][n])


if __name__ == "__main__":
    if WORLD > 1:
        dist.init_process_group("gloo")
    x = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    box = [tempfile.mkdtemp() if RANK == 0 else None]
    if WORLD > 1:
        dist.broadcast_object_list(box)
    path = os.path.join(box[0], "state.pt")

    parts = build(x)
    train(*parts, 0, 30)
    save(path, *parts)

    parts = build(x)
    load(path, *parts)
    train(*parts, 30, 60)
    if WORLD > 1:
        dist.barrier()
        dist.destroy_process_group()
