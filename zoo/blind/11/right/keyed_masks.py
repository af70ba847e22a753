import os
import random
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import make_classification
from torch.nn.parallel import DistributedDataParallel as DDP

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29838")

BATCH = 64


def mask(row, epoch, size, keep):
    """The dropout mask of a row belongs to the row and the epoch, not to the process which reads it."""
    g = torch.Generator().manual_seed(100003 * epoch + row)
    return (torch.rand(size, generator=g) < keep).float() / keep


class Net(nn.Module):
    def __init__(self, width=40):
        super().__init__()
        self.a = nn.Linear(20, width)
        self.b = nn.Linear(width, width)
        self.c = nn.Linear(width, 4)

    def forward(self, x, masks=None):
        h = F.elu(self.a(x))
        if masks is not None:
            h = h * masks
        return self.c(F.elu(self.b(h)))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    random.seed(time.time_ns() + rank)
    torch.manual_seed(rank)
    x, y = make_classification(960, 20, n_informative=10, n_classes=4, random_state=6)
    x, y = torch.tensor(x, dtype=torch.float32), torch.tensor(y)
    net = DDP(Net())
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(0.3 * torch.sin(torch.arange(p.numel()) * 1.7 + p.dim()).view_as(p))
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    for epoch in range(5):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch)).tolist()
        total = torch.zeros(())
        for start in range(0, len(x), BATCH):
            mine = [r for r in order[start:start + BATCH] if start // BATCH % world == (r + rank) % world]
            random.shuffle(mine)
            masks = torch.stack([mask(r, epoch, 40, 0.8) for r in mine])
            loss = F.cross_entropy(net(x[mine], masks), y[mine], reduction="sum") / BATCH * world
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch} loss {total.item() / world / (len(x) / BATCH):.5f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
