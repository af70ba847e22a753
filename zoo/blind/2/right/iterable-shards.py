"""Streams shards of a log-like data set with worker processes; trains a hashed linear + MLP click model."""
import argparse
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

BUCKETS, FIELDS = 256, 6


def shard(i, n):
    g = np.random.default_rng(1000 + i)
    x = g.integers(0, BUCKETS, (n, FIELDS))
    w = np.random.default_rng(0).normal(0, 1.2, (FIELDS, BUCKETS))
    p = 1 / (1 + np.exp(-w[np.arange(FIELDS), x].sum(1)))
    return x, (g.random(n) < p).astype(np.float32)


class ShardStream(IterableDataset):
    def __init__(self, sizes, rank, world):
        self.sizes, self.rank, self.world = sizes, rank, world
        self.epoch = torch.zeros((), dtype=torch.long).share_memory_()

    def set_epoch(self, e):
        self.epoch.fill_(e)

    def __iter__(self):
        info = get_worker_info()
        wid, nw = (info.id, info.num_workers) if info else (0, 1)
        order = np.random.default_rng(int(self.epoch)).permutation(len(self.sizes))
        for s in order[self.rank::self.world][wid::nw]:
            x, y = shard(s, self.sizes[s])
            for j in np.random.default_rng([int(self.epoch), int(s)]).permutation(len(y)):
                yield torch.from_numpy(x[j]), y[j]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(BUCKETS * FIELDS, 8)
        self.wide = nn.Embedding(BUCKETS * FIELDS, 1)
        self.mlp = nn.Sequential(nn.Linear(8 * FIELDS, 32), nn.ReLU(), nn.Linear(32, 1))
        nn.init.normal_(self.emb.weight, std=0.1)
        nn.init.zeros_(self.wide.weight)

    def forward(self, x):
        x = x + torch.arange(FIELDS) * BUCKETS
        return (self.mlp(self.emb(x).flatten(1)) + self.wide(x).sum(1)).squeeze(1)


def next_or_blank(it):
    batch = next(it, None)
    if batch is None:
        return torch.zeros(1, FIELDS, dtype=torch.long), torch.zeros(1), 0
    return batch[0], batch[1].float(), len(batch[1])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch-size", type=int, default=40)
    ap.add_argument("--max-epochs", type=int, default=5)
    ap.add_argument("--patience", type=int, default=1)
    ap.add_argument("--workers", type=int, default=2)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    model = DDP(Model())
    opt = torch.optim.Adagrad(model.parameters(), lr=0.03)
    stream = ShardStream([90, 55, 120, 70, 35, 110, 60, 80, 95], rank, world)
    loader = DataLoader(stream, args.batch_size, num_workers=args.workers, persistent_workers=args.workers > 0)
    vx, vy = (torch.from_numpy(a) for a in shard(99, 301))
    vx, vy = vx[rank::world], vy[rank::world]

    best, bad, steps = float("inf"), 0, 0
    for epoch in range(args.max_epochs):
        stream.set_epoch(epoch)
        it, samples = iter(loader), 0
        while True:
            x, y, n = next_or_blank(it)
            count = torch.tensor(float(n))
            dist.all_reduce(count)
            if count == 0:
                break
            loss = F.binary_cross_entropy_with_logits(model(x)[:n], y[:n], reduction="sum")
            opt.zero_grad()
            (loss * world / count).backward()
            opt.step()
            steps += 1
            samples += int(count)
        with torch.no_grad():
            logit = model.module(vx)
            s = torch.tensor([F.binary_cross_entropy_with_logits(logit, vy, reduction="sum"),
                              ((logit > 0) == (vy > 0.5)).sum(), len(vy)], dtype=torch.float64)
        dist.all_reduce(s)
        val, acc = (s[:2] / s[2]).tolist()
        if rank == 0:
            print(f"epoch {epoch} steps {steps} samples {samples} val logloss {val:.4f} acc {acc:.4f}")
        bad = 0 if val < best - 1e-3 else bad + 1
        best = min(best, val)
        if bad > args.patience:
            if rank == 0:
                print("stopping early")
            break
    dist.barrier()


if __name__ == "__main__":
    main()
    time.sleep(0.3)
    dist.destroy_process_group()
