"""Momentum contrast on the digits images with a queue of keys, scored by class prototypes."""
import copy
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP

BATCH, QUEUE, DIM, STEPS, TEMP, MOMENTUM = 32, 160, 24, 24, 0.2, 0.95


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.GELU(), nn.Conv2d(12, 24, 3, stride=2), nn.GELU())
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(24 * 9, 64), nn.GELU(), nn.Linear(64, DIM))

    def forward(self, x):
        return F.normalize(self.head(self.conv(x)), dim=1)


def views(x, g):
    noise = 0.15 * torch.randn(x.shape, generator=g)
    shift = torch.randint(-1, 2, (len(x), 2), generator=g).tolist()
    moved = torch.stack([img.roll(s, dims=(1, 2)) for img, s in zip(x, shift)])
    gain = 0.7 + 0.6 * torch.rand(len(x), 1, 1, 1, generator=g)
    return moved * gain + noise


class Queue:
    def __init__(self):
        self.keys = F.normalize(torch.randn(QUEUE, DIM, generator=torch.Generator().manual_seed(0)), dim=1)
        self.at = 0

    def push(self, keys):
        self.keys[self.at:self.at + len(keys)] = keys
        self.at = (self.at + len(keys)) % QUEUE


def gather(t, world):
    if world == 1:
        return t
    out = [torch.empty_like(t) for _ in range(world)]
    dist.all_gather(out, t.contiguous())
    return torch.cat(out)


@torch.no_grad()
def prototypes(net, x, y, xv, yv, rank, world):
    bank = gather(torch.cat([net(c) for c in x.chunk(world)[rank].split(64)]), world)
    center = bank.mean(0)
    proto = torch.stack([F.normalize((bank[y == c] - center).mean(0), dim=0) for c in range(10)])
    guess = ((net(xv.chunk(world)[rank]) - center) @ proto.T).argmax(1)
    right = (guess == yv.chunk(world)[rank]).sum()
    if world > 1:
        dist.all_reduce(right)
    return right.item() / len(xv)


def main():
    world = int(os.environ.get("WORLD_SIZE", 1))
    rank = int(os.environ.get("RANK", 0))
    if world > 1:
        dist.init_process_group("gloo")
    data = load_digits()
    x = torch.from_numpy(data.images).to(torch.get_default_dtype()).unsqueeze(1) / 16
    y = torch.from_numpy(data.target)
    x, y, xv, yv = x[:800], y[:800], x[800:1000], y[800:1000]

    torch.manual_seed(5)
    query = Encoder()
    key = copy.deepcopy(query).requires_grad_(False)
    model = DDP(query) if world > 1 else query
    opt = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=1e-4)
    queue = Queue()
    g = torch.Generator().manual_seed(8)

    for step in range(STEPS):
        ids = torch.randperm(len(x), generator=g)[:BATCH]
        one, two = views(x[ids], g).chunk(world)[rank], views(x[ids], g).chunk(world)[rank]
        q = model(one)
        with torch.no_grad():
            for a, b in zip(key.parameters(), query.parameters()):
                a.mul_(MOMENTUM).add_(b, alpha=1 - MOMENTUM)
            k = key(two)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ queue.keys.T], 1) / TEMP
        loss = F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long))
        opt.zero_grad()
        loss.backward()
        opt.step()
        queue.push(gather(k, world))
        if step % 6 == 5:
            mean = loss.detach() / world
            if world > 1:
                dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step} contrast {mean:.5f}")
    score = prototypes(query, x, y, xv, yv, rank, world)
    if rank == 0:
        print(f"prototype accuracy {score:.4f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
