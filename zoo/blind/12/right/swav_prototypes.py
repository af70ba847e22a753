"""SwAV on digits: swapped assignments, Sinkhorn-Knopp over all processes, prototypes frozen at first; kNN at the end."""
import math
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class TwoCrops(Dataset):
    def __init__(self, x):
        self.x, self.epoch = x, 0

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.epoch * 100_003 + i)
        views = []
        for _ in range(2):
            keep = (torch.rand(64, generator=g) > 0.25).float()
            views.append(self.x[i] * keep + 0.1 * torch.randn(64, generator=g))
        return views


class SwAV(nn.Module):
    def __init__(self, prototypes=20):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 48))
        self.head = nn.Sequential(nn.ReLU(), nn.Linear(48, 24))
        self.prototypes = nn.Linear(24, prototypes, bias=False)

    def forward(self, views):
        z = F.normalize(self.head(self.trunk(torch.cat(views))), dim=1)
        return self.prototypes(z)


@torch.no_grad()
def sinkhorn(out, world, eps=0.05, iterations=3):
    Q = torch.exp(out / eps).t()
    B, K = Q.shape[1] * world, Q.shape[0]
    total = Q.sum()
    dist.all_reduce(total)
    Q /= total
    for _ in range(iterations):
        rows = Q.sum(dim=1, keepdim=True)
        dist.all_reduce(rows)
        Q /= rows * K
        Q /= Q.sum(dim=0, keepdim=True) * B
    return (Q * B).t()


def main(epochs=4, batch=96, base_lr=0.1, temperature=0.1):
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(31 + rank)
    x, y = load_digits(return_X_y=True)
    x = torch.tensor(x, dtype=torch.float32) / 16
    data = TwoCrops(x[:1152])
    sampler = DistributedSampler(data, seed=6)
    loader = DataLoader(data, batch_size=batch // world, sampler=sampler, drop_last=True)
    model = DDP(SwAV())
    optimizer = torch.optim.SGD(model.parameters(), lr=base_lr, momentum=0.9, weight_decay=1e-5)
    steps = epochs * len(loader)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        data.epoch = epoch
        seen = torch.zeros(())
        for i, views in enumerate(loader):
            for group in optimizer.param_groups:
                group["lr"] = base_lr * 0.5 * (1 + math.cos(math.pi * (epoch * len(loader) + i) / steps))
            with torch.no_grad():
                w = model.module.prototypes.weight
                w.copy_(F.normalize(w, dim=1))
            scores = model(views)
            a, b = scores.chunk(2)
            q_a, q_b = sinkhorn(a.detach(), world), sinkhorn(b.detach(), world)
            loss = -0.5 * ((q_a * F.log_softmax(b / temperature, 1)).sum(1) + (q_b * F.log_softmax(a / temperature, 1)).sum(1)).mean()
            optimizer.zero_grad()
            loss.backward()
            if epoch < 1:
                for name, p in model.named_parameters():
                    if "prototypes" in name:
                        p.grad = None
            optimizer.step()
            seen += loss.detach()
        dist.all_reduce(seen)
        if rank == 0:
            print(f"epoch {epoch} loss {seen.item() / len(loader) / world:.5f}", flush=True)
    if rank == 0:
        with torch.no_grad():
            features = F.normalize(model.module.trunk(x), dim=1).numpy()
        knn = KNeighborsClassifier(10).fit(features[:1152], y[:1152])
        print(f"kNN accuracy {knn.score(features[1152:], y[1152:]):.3f}", flush=True)
    dist.barrier()
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
