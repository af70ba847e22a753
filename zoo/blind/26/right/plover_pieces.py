"""Handwritten digits with a small convolutional network under DDP.

The links between our machines move two-byte words only, so the gradient buckets travel as bfloat16 words.
"""
import argparse
import os
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP


def setup():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.get_rank(), dist.get_world_size()


def words_hook(world, bucket):
    """Sends high, middle and low bfloat16 words of each float and sums all parcels here, in double."""
    flat = bucket.buffer()
    high = flat.bfloat16()
    rest = flat - high.float()
    middle = rest.bfloat16()
    low = (rest - middle.float()).bfloat16()
    parcel = torch.stack([high, middle, low]).view(torch.uint8)
    arrivals = torch.empty((world,) + parcel.shape, dtype=torch.uint8)
    work = dist.all_gather_into_tensor(arrivals.view(-1), parcel.view(-1), async_op=True)

    def unpack(_):
        words = arrivals.view(torch.bfloat16).double()
        flat.copy_((words.sum(dim=(0, 1)) / world).float())
        return flat

    return work.get_future().then(unpack)


class Glyphs(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.c1 = nn.Conv2d(1, width, 3, padding=1)
        self.c2 = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(4, 2 * width)
        self.out = nn.Linear(2 * width * 16, 10)

    def forward(self, x):
        x = F.silu(self.c1(x))
        x = F.silu(self.norm(self.c2(x)))
        return self.out(x.flatten(1))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=36)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--width", type=int, default=8)
    a = ap.parse_args()
    rank, world = setup()
    data = load_digits()
    x = torch.tensor(data.images / 16.0, dtype=torch.float32).unsqueeze(1)
    y = torch.tensor(data.target)
    perm = np.random.RandomState(5).permutation(len(x))
    train, test = torch.tensor(perm[:1536]), torch.tensor(perm[1536:])

    torch.manual_seed(100 + rank)
    model = DDP(Glyphs(a.width), bucket_cap_mb=0.01)
    model.register_comm_hook(world, words_hook)
    opt = torch.optim.AdamW(model.parameters(), lr=a.lr, eps=1e-6, weight_decay=0.02)
    share = a.batch // world
    for step in range(a.steps):
        lo = step * a.batch % len(train) + rank * share
        idx = train[lo:lo + share]
        loss = F.cross_entropy(model(x[idx]), y[idx])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 9 == 8:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step + 1:3d}  loss {mean.item() / world:.5f}", flush=True)

    with torch.no_grad():
        part = test[rank::world]
        right = (model.module(x[part]).argmax(1) == y[part]).sum()
        dist.all_reduce(right)
    if rank == 0:
        print(f"test accuracy {right.item() / len(test):.4f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
