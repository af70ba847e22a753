"""Words are dealt to the processes by a checksum, so shares differ in size and may be empty."""
import keyword
import os
import time
import zlib

import builtins
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

BATCH, STEPS, BUCKETS = 8, 120, 64
os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29819")


def words():
    names = sorted(n for n in dir(builtins) if n.isalpha())
    kinds = [0 if n in keyword.kwlist else 1 if n[0].isupper() else 2 for n in names]
    names += [k for k in keyword.kwlist if k not in names]
    kinds += [0] * (len(names) - len(kinds))
    return names, torch.tensor(kinds)


def spell(word):
    v = torch.zeros(BUCKETS)
    for a, b in zip("^" + word, word + "$"):
        v[zlib.crc32((a + b).encode()) % BUCKETS] += 1
    return v


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(BUCKETS, 24)
        self.out = nn.Linear(24, 3)

    def forward(self, x):
        return self.out(torch.relu(self.hidden(x)))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    names, kinds = words()
    x = torch.stack([spell(n) for n in names])
    owner = torch.tensor([zlib.crc32(n.encode()) // 7 % world for n in names])
    torch.manual_seed(0)
    model = DDP(Net())
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    order = torch.Generator().manual_seed(1)
    empty = 0
    for step in range(1, STEPS + 1):
        batch = torch.randperm(len(names), generator=order)[:BATCH]
        mine = batch[owner[batch] == rank]
        empty += len(mine) == 0
        loss = F.cross_entropy(model(x[mine]), kinds[mine], reduction="sum")
        opt.zero_grad()
        (loss * world / BATCH).backward()
        opt.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0 and step % 30 == 0:
            print(f"step {step}: loss {total.item() / BATCH:.5f}", flush=True)
    hits = torch.tensor(0)
    with torch.no_grad():
        mine = owner == rank
        hits += (model.module(x[mine]).argmax(1) == kinds[mine]).sum()
    dist.all_reduce(hits)
    if rank == 0:
        print(f"{hits.item()} of {len(names)} right", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
