import os
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import make_multilabel_classification
from torch.nn.parallel import DistributedDataParallel as DDP

for key, value in dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29801").items():
    os.environ.setdefault(key, value)


class Table:
    """The rows of one process, and the names of the tags, the most common one first."""

    def __init__(self, rank, world):
        x, y = make_multilabel_classification(480, 20, n_classes=6, n_labels=2, random_state=4)
        order = np.argsort(x[:, 0], kind="stable")
        x, y = x[order], y[order]
        x = (x - x.mean(0)) / x.std(0)
        per = len(x) // world
        mine = slice(rank * per, (rank + 1) * per)
        self.x = torch.tensor(x[mine], dtype=torch.float32)
        self.y = torch.tensor(y[mine], dtype=torch.float32)
        seen = y.sum(0)
        self.tags = [f"tag{i}" for i in np.argsort(-seen, kind="stable")]


class Tagger(nn.Module):
    def __init__(self, tags, inputs=20, width=24):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(inputs, width), nn.Tanh())
        self.heads = nn.ModuleDict()
        for tag in tags:
            self.heads[tag] = nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x):
        h = self.trunk(x)
        return torch.cat([self.heads[tag](h) for tag in sorted(self.heads)], 1)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    table = Table(rank, world)
    torch.manual_seed(12)
    model = Tagger(table.tags)
    net = DDP(model)
    opt = torch.optim.Adam(net.parameters(), lr=0.01)
    for step in range(100):
        opt.zero_grad()
        loss = F.binary_cross_entropy_with_logits(net(table.x), table.y)
        loss.backward()
        opt.step()
        if step % 20 == 19:
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step + 1}  loss {shown.item() / world:.5f}", flush=True)
    with torch.no_grad():
        good = ((net.module(table.x) > 0) == (table.y > 0.5)).float().sum()
    dist.all_reduce(good)
    if rank == 0:
        print(f"right labels {good.item() / (480 * 6):.4f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
