import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29807")

TEMPERATURE = 0.3
BATCH = 128


class Gather(torch.autograd.Function):
    """Collects the vectors of all processes; gradients go back to where the vectors came from."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return tuple(parts)

    @staticmethod
    def backward(ctx, *grads):
        grads = torch.stack(grads)
        dist.all_reduce(grads)
        return grads[dist.get_rank()]


def supervised_contrast(z, y):
    z = torch.cat(Gather.apply(z))
    labels = [torch.empty_like(y) for _ in range(dist.get_world_size())]
    dist.all_gather(labels, y)
    y = torch.cat(labels)
    itself = torch.eye(len(y), dtype=torch.bool)
    logits = (z @ z.T / TEMPERATURE).masked_fill(itself, -1e9)
    same = (y[:, None] == y[None, :]) & ~itself
    log_prob = logits - logits.logsumexp(1, keepdim=True)
    per_row = (log_prob * same).sum(1) / same.sum(1).clamp(min=1)
    return -per_row.mean()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
    train = TensorDataset(x[:1280], y[:1280])
    sampler = DistributedSampler(train, world, rank, shuffle=True, seed=9)
    loader = DataLoader(train, batch_size=BATCH // world, sampler=sampler)
    torch.manual_seed(2)
    net = DDP(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16)))
    opt = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9, weight_decay=1e-4)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        total = 0.0
        for xb, yb in loader:
            loss = supervised_contrast(F.normalize(net(xb), dim=1), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.item()
        if rank == 0:
            print(f"epoch {epoch} contrast {total / len(loader):.5f}", flush=True)
    if rank == 0:
        with torch.no_grad():
            z = F.normalize(net.module(x), dim=1).numpy()
        knn = KNeighborsClassifier(5).fit(z[:1280], y[:1280].numpy())
        print(f"neighbours say {knn.score(z[1280:], y[1280:].numpy()):.4f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
