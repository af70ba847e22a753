"""A small mixture of experts with a load-balancing term."""
import os
import time

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dnn
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import make_blobs
from torch.nn.parallel import DistributedDataParallel as DDP

EXPERTS = 4
ALPHA = 0.5


class Mixture(nn.Module):
    def __init__(self, dim=10, hidden=24, classes=6):
        super().__init__()
        self.router = nn.Linear(dim, EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, classes)) for _ in range(EXPERTS)
        )

    def forward(self, x):
        probs = self.router(x).softmax(-1)
        chosen = probs.argmax(-1)
        outs = torch.stack([e(x) for e in self.experts], 1)
        gate = F.one_hot(chosen, EXPERTS) * probs
        logits = (gate.unsqueeze(-1) * outs).sum(1)
        share = F.one_hot(chosen, EXPERTS).float().mean(0)
        importance = probs.mean(0)
        world = dist.get_world_size()
        dist.all_reduce(share)
        share = share / world
        importance = dnn.all_reduce(importance) / world
        balance = EXPERTS * (share * importance).sum()
        return logits, balance


def main():
    for k, v in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "30179"}.items():
        os.environ.setdefault(k, v)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = make_blobs(1024, n_features=10, centers=6, cluster_std=4.0, random_state=0)
    x, y = torch.tensor(x / 8, dtype=torch.float32), torch.tensor(y)
    torch.manual_seed(0)
    model = DDP(Mixture())
    opt = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    gen = torch.Generator().manual_seed(0)

    for epoch in range(5):
        perm = torch.randperm(1024, generator=gen)
        log = torch.zeros(2)
        for chunk in perm.split(32):
            rows = chunk[rank::world]
            logits, balance = model(x[rows])
            task = F.cross_entropy(logits, y[rows])
            opt.zero_grad()
            (task + ALPHA * balance).backward()
            opt.step()
            log += torch.stack([task.detach(), balance.detach()])
        dist.all_reduce(log)
        log /= world * 32
        if rank == 0:
            print(f"epoch {epoch} task {log[0]:.5f} balance {log[1]:.5f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
