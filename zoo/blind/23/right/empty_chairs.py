"""Residual network (ReZero) on handwritten digits.  The tail of an epoch is trained as well, however short it is."""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Sampler


class Digits(Dataset):
    def __init__(self, rows):
        d = load_digits()
        self.x = torch.tensor(d.data[rows] / 8.0 - 1.0, dtype=torch.float32)
        self.y = torch.tensor(d.target[rows])

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class ShareOfBatch(Sampler):
    """Batches of the whole world in a common order; gives this rank every world-th row of each, possibly none."""

    def __init__(self, n, batch, rank, world, seed):
        self.n, self.batch, self.rank, self.world, self.seed, self.epoch = n, batch, rank, world, seed, 0

    def whole(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        return torch.randperm(self.n, generator=g).split(self.batch)

    def __iter__(self):
        for rows in self.whole():
            yield rows[self.rank::self.world].tolist()

    def __len__(self):
        return -(-self.n // self.batch)


def collate(items):
    if not items:
        return torch.empty(0, 64), torch.empty(0, dtype=torch.long)
    xs, ys = zip(*items)
    return torch.stack(xs), torch.stack(ys)


class Branch(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.alpha = nn.Parameter(torch.zeros(1))

    def forward(self, h):
        return h + self.alpha * self.down(F.relu(self.up(self.norm(h))))


class Net(nn.Module):
    def __init__(self, width=40, depth=3):
        super().__init__()
        self.stem = nn.Linear(64, width)
        self.branches = nn.ModuleList(Branch(width) for _ in range(depth))
        self.head = nn.Linear(width, 10)
        nn.init.zeros_(self.head.weight)

    def forward(self, x):
        h = self.stem(x)
        for b in self.branches:
            h = b(h)
        return self.head(h)


def run(epochs=5, batch=64):
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    perm = torch.randperm(1797, generator=torch.Generator().manual_seed(1)).numpy()
    train, test = Digits(perm[:449]), Digits(perm[1400:])
    torch.manual_seed(8)
    ddp = DistributedDataParallel(Net())
    opt = torch.optim.SGD(ddp.parameters(), lr=0.08, momentum=0.9, nesterov=True, weight_decay=5e-4)
    sampler = ShareOfBatch(len(train), batch, rank, world, seed=70)
    loader = DataLoader(train, batch_sampler=sampler, collate_fn=collate)

    for epoch in range(epochs):
        sampler.epoch = epoch
        sizes = [len(r) for r in sampler.whole()]
        running = torch.zeros(2, dtype=torch.float64)
        for (x, y), size in zip(loader, sizes):
            opt.zero_grad()
            total = F.cross_entropy(ddp(x), y, reduction="sum")
            (total * world / size).backward()
            opt.step()
            running += torch.tensor([total.item(), len(y)], dtype=torch.float64)
        dist.all_reduce(running)
        if rank == 0:
            gates = " ".join(f"{b.alpha.item():+.5f}" for b in ddp.module.branches)
            print(f"epoch {epoch}: loss {running[0] / running[1]:.6f} over {int(running[1])} rows, gates {gates}", flush=True)

    with torch.no_grad():
        part = torch.arange(len(test)).tensor_split(world)[rank]
        good = (ddp.module(test.x[part]).argmax(1) == test.y[part]).sum()
    dist.all_reduce(good)
    if rank == 0:
        print(f"test accuracy {good.item() / len(test):.4f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    run()
