import contextlib
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29847")

PART, PARTS = 8, 12
BATCH = PART * PARTS
# the machines are of different speed: how many of the 12 parts each one takes
PLAN = {1: [12], 2: [9, 3], 4: [6, 3, 2, 1]}


def get_data():
    x, y = load_digits(return_X_y=True)
    return torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(y)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 3, padding=1)
        self.norm = nn.GroupNorm(2, 6)
        self.conv2 = nn.Conv2d(6, 8, 3, padding=1, stride=2)
        self.out = nn.Linear(8 * 16, 10)

    def forward(self, x):
        return self.out(F.relu(self.conv2(F.relu(self.norm(self.conv1(x))))).flatten(1))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    plan = PLAN[world]
    first = sum(plan[:rank]) * PART
    torch.manual_seed(8)
    net = DDP(Net())
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    x, y = get_data()
    for epoch in range(3):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        total = torch.zeros(())
        for start in range(0, len(x) - BATCH + 1, BATCH):
            mine = order[start + first:start + first + plan[rank] * PART]
            opt.zero_grad()
            for k, rows in enumerate(mine.split(PART), 1):
                quiet = net.no_sync() if k < plan[rank] else contextlib.nullcontext()
                with quiet:
                    loss = F.cross_entropy(net(x[rows]), y[rows])
                    (loss * PART * world / BATCH).backward()
                total += loss.detach() * PART
            opt.step()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch} loss {total.item() / (len(x) // BATCH * BATCH):.5f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
