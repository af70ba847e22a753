import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import make_blobs
from torch.nn.parallel import DistributedDataParallel as DDP

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29814")

BATCH, MARKED = 32, 4


def batches(epoch, n=1280):
    """Every batch of 32 rows has 4 rows which somebody has looked at; the label of the others is -1."""
    g = torch.Generator().manual_seed(epoch)
    order = torch.randperm(n, generator=g)
    per = n // BATCH
    known = order[order % 8 == 0].view(per, MARKED)
    others = order[order % 8 != 0].view(per, BATCH - MARKED)
    for k in range(per):
        yield torch.cat([known[k], others[k]])[torch.randperm(BATCH, generator=g)]


def get_data():
    x, y = make_blobs(1280, 12, centers=6, cluster_std=6.0, random_state=8)
    x = torch.tensor((x - x.mean(0)) / x.std(0), dtype=torch.float32)
    y = torch.tensor(y)
    seen = torch.where(torch.arange(len(y)) % 8 == 0, y, -1)
    return x, y, seen


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=8))
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y, seen = get_data()
    torch.manual_seed(14)
    net = DDP(nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 6)))
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(4):
        total = torch.zeros(2)
        for rows in batches(epoch):
            mine = rows[rank::world]
            known = seen[mine] >= 0
            logits = net(x[mine])
            loss = F.cross_entropy(logits[known], y[mine][known], reduction="sum") * world / MARKED
            opt.zero_grad()
            loss.backward()
            opt.step()
            total[0] += loss.detach() / world
            total[1] += known.sum()
        if rank == 0:
            print(f"epoch {epoch} done", flush=True)
    dist.all_reduce(total)
    if rank == 0:
        print(f"last epoch: {total[1].item():.0f} marked rows, loss {total[0].item() / 40:.5f}", flush=True)
    with torch.no_grad():
        right = (net.module(x[rank::world]).argmax(1) == y[rank::world]).sum()
    dist.all_reduce(right)
    if rank == 0:
        print(f"right {right.item() / len(x):.4f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
