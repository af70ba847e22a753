import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.metrics import f1_score
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29815")


class Digits(Dataset):
    def __init__(self, part):
        x, y = load_digits(return_X_y=True)
        cut = slice(0, 1280) if part == "train" else slice(1280, None)
        self.x = torch.tensor(x[cut], dtype=torch.float32).view(-1, 1, 8, 8) / 16
        self.y = torch.tensor(y[cut])

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class SmallConv(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.out = nn.Linear(8 * 16, 10)

    def forward(self, x):
        return self.out(F.max_pool2d(F.relu(self.conv(x)), 2).flatten(1))


@torch.no_grad()
def score(net, data, rank, world):
    """Macro F1 of the test rows; every process reads some of them and keeps a ledger of (guess, truth)."""
    rows = range(rank, len(data), world)
    ledger = {}
    net.eval()
    for k, (x, y) in enumerate(DataLoader(Subset(data, rows), batch_size=1)):
        ledger[rows[k]] = (net(x).argmax(1).item(), y.item())
    net.train()
    ledgers = [None] * world
    dist.all_gather_object(ledgers, ledger)
    merged = {}
    for part in ledgers:
        merged.update(part)
    guess, truth = zip(*merged.values())
    return f1_score(truth, guess, average="macro")


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    train, test = Digits("train"), Digits("test")
    sampler = DistributedSampler(train, seed=2)
    loader = DataLoader(train, batch_size=64 // world, sampler=sampler)
    torch.manual_seed(1)
    net = DDP(SmallConv())
    opt = torch.optim.Adam(net.parameters(), lr=5e-3)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad()
            F.cross_entropy(net(x), y).backward()
            opt.step()
        f1 = score(net.module, test, rank, world)
        if rank == 0:
            print(f"epoch {epoch}  F1 {f1:.5f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
