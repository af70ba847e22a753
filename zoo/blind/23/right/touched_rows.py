"""Which module does a symbol belong to?  Hashed trigrams, an embedding bag, a small head.

The table is large and a batch touches few of its rows, so only the union of touched rows goes over the wire; the head is
an ordinary DDP matter.
"""
import ast
import errno
import math
import os
import signal
import socket
import stat
import time
import token
import zlib

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

MODULES = [ast, errno, math, os, signal, socket, stat, token]
ROWS, DIM, BATCH, STEPS = 4096, 20, 48, 45


def symbols():
    out = []
    for label, module in enumerate(MODULES):
        for name in sorted(dir(module)):
            if name.startswith("_"):
                continue
            s = f"<{name}>"
            grams = [zlib.crc32(s[i:i + 3].encode()) % ROWS for i in range(len(s) - 2)]
            out.append((torch.tensor(grams), label))
    return out


class Guesser(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.EmbeddingBag(ROWS, DIM, mode="mean")
        self.head = nn.Sequential(nn.Linear(DIM, 32), nn.Tanh(), nn.Linear(32, len(MODULES)))
        nn.init.normal_(self.table.weight, std=0.3)

    def forward(self, flat, offsets):
        return self.head(self.table(flat, offsets))


def pack(items):
    lengths = torch.tensor([len(g) for g, _ in items])
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)[:-1]])
    return torch.cat([g for g, _ in items]), offsets, torch.tensor([label for _, label in items])


def share_touched(weight, flat, world):
    """Average of the table's gradient, rows that somebody touched only."""
    mine = flat.unique()
    counts = [torch.zeros(1, dtype=torch.long) for _ in range(world)]
    dist.all_gather(counts, torch.tensor([len(mine)]))
    longest = int(max(c.item() for c in counts))
    boxes = [torch.empty(longest, dtype=torch.long) for _ in range(world)]
    dist.all_gather(boxes, F.pad(mine, (0, longest - len(mine)), value=-1))
    union = torch.cat(boxes).unique()
    union = union[union >= 0]
    rows = weight.grad[union]
    dist.all_reduce(rows)
    weight.grad[union] = rows / world
    return len(mine), len(union)


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    data = symbols()
    mix = torch.randperm(len(data), generator=torch.Generator().manual_seed(5)).tolist()
    test, train = mix[:120], mix[120:]

    torch.manual_seed(27)
    model = Guesser()
    DDP._set_params_and_buffers_to_ignore_for_model(model, ["table.weight"])
    ddp = DDP(model)
    slow = torch.optim.Adagrad(model.table.parameters(), lr=0.2, initial_accumulator_value=1e-4)
    fast = torch.optim.SGD(model.head.parameters(), lr=0.3, momentum=0.9)

    order, lap = [], 0
    for step in range(1, STEPS + 1):
        if len(order) < BATCH:
            shuffled = torch.randperm(len(train), generator=torch.Generator().manual_seed(80 + lap)).tolist()
            order, lap = [train[i] for i in shuffled], lap + 1
        batch, order = order[:BATCH], order[BATCH:]
        flat, offsets, labels = pack([data[i] for i in batch[rank::world]])
        loss = F.cross_entropy(ddp(flat, offsets), labels)
        slow.zero_grad()
        fast.zero_grad()
        loss.backward()
        mine, union = share_touched(model.table.weight, flat, world)
        slow.step()
        fast.step()
        if step % 9 == 0:
            dist.all_reduce(shown := loss.detach() / world)
            if rank == 0:
                print(f"step {step}  loss {shown.item():.6f}  rows {union} (of them here {mine})", flush=True)

    with torch.no_grad():
        flat, offsets, labels = pack([data[i] for i in test[rank::world]])
        tally = torch.stack([(model(flat, offsets).argmax(1) == labels).sum(), torch.tensor(len(labels))])
    dist.all_reduce(tally)
    if rank == 0:
        print(f"right module {tally[0].item()} of {tally[1].item()}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
