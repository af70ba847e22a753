"""Image classifier over a pixel graph; the rate falls when the validation loss stalls."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def grid_adjacency(n=8):
    a = torch.eye(n * n)
    for i in range(n):
        for j in range(n):
            for di, dj in ((0, 1), (1, 0)):
                if i + di < n and j + dj < n:
                    p, q = i * n + j, (i + di) * n + j + dj
                    a[p, q] = a[q, p] = 1.0
    d = a.sum(1).rsqrt()
    return d[:, None] * a * d[None]


class PixelGCN(nn.Module):
    def __init__(self, hidden=24):
        super().__init__()
        self.register_buffer("adj", grid_adjacency())
        self.pos = nn.Parameter(torch.randn(64, 4) * 0.3)
        self.w1 = nn.Linear(5, hidden)
        self.w2 = nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden * 4, 10)

    def forward(self, x):
        h = torch.cat([x.unsqueeze(2), self.pos.expand(len(x), -1, -1)], 2)
        h = F.relu(self.w1(self.adj @ h))
        h = F.relu(self.w2(self.adj @ h))
        q = h.view(len(x), 2, 4, 2, 4, -1).mean((2, 4))
        return self.out(q.flatten(1))


class Trainer:
    def __init__(self, rank, world):
        self.rank, self.world = rank, world
        d = load_digits()
        x = torch.tensor(d.data, dtype=torch.float32) / 16
        y = torch.tensor(d.target)
        self.sampler = DistributedSampler(TensorDataset(x[:256], y[:256]), seed=13)
        self.train = DataLoader(self.sampler.dataset, 64 // world, sampler=self.sampler)
        self.valid = DataLoader(TensorDataset(x[600 + rank:720:world], y[600 + rank:720:world]), 60)
        torch.manual_seed(31)
        self.model = DDP(PixelGCN())
        self.opt = torch.optim.Adam(self.model.parameters(), lr=0.04)
        self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(self.opt, factor=0.4, patience=1, threshold=0.05)

    def epoch(self, e):
        self.sampler.set_epoch(e)
        self.model.train()
        for x, y in self.train:
            self.opt.zero_grad()
            F.cross_entropy(self.model(x), y).backward()
            self.opt.step()

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        s = torch.zeros(2)
        for x, y in self.valid:
            s += torch.tensor([F.cross_entropy(self.model.module(x), y, reduction="sum").item(), len(y)])
        dist.all_reduce(s)
        return (s[0] / s[1]).item()

    def fit(self, epochs):
        for e in range(epochs):
            self.epoch(e)
            val = self.validate()
            self.plateau.step(val)
            if self.rank == 0:
                print(f"epoch {e} validation {val:.5f} next rate {self.opt.param_groups[0]['lr']:.5f}")


if __name__ == "__main__":
    for k, v in dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29651").items():
        os.environ.setdefault(k, v)
    dist.init_process_group("gloo")
    Trainer(dist.get_rank(), dist.get_world_size()).fit(14)
    dist.barrier()
    dist.destroy_process_group()
