"""Survival times with Cox's partial likelihood: every row's risk set is the whole batch, the shares of the processes are uneven."""
import os
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

ROWS, HELD, BATCH, EPOCHS = 600, 180, 60, 4


def patients(seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(ROWS + HELD, 8))
    risk = x[:, 0] - 0.8 * x[:, 1] * x[:, 2] + 0.5 * np.abs(x[:, 3])
    life, leave = rng.exponential(np.exp(-risk)), rng.exponential(2.0, len(x))
    return (torch.tensor(x, dtype=torch.float32), torch.tensor(np.minimum(life, leave)), torch.tensor(life <= leave))


class GatherRows(torch.autograd.Function):
    """Joins blocks of different lengths; the gradient of the own block comes back."""

    @staticmethod
    def forward(ctx, rows, sizes):
        rank = dist.get_rank()
        ctx.where = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        padded = rows.new_zeros(max(sizes))
        padded[: len(rows)] = rows
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded)
        return torch.cat([p[:n] for p, n in zip(parts, sizes)])

    @staticmethod
    def backward(ctx, grad):
        return grad[ctx.where], None


def partial_likelihood(score, time_, event):
    order = time_.argsort(descending=True)
    score, event = score[order], event[order]
    return (torch.logcumsumexp(score, 0) - score)[event].sum() / event.sum()


def concordance(score, time_, event):
    good = pairs = 0.0
    for i in event.nonzero()[:, 0].tolist():
        later = time_ > time_[i]
        pairs += later.sum().item()
        good += (score[i] > score[later]).sum().item()
    return good / pairs


class Survival:
    def __init__(self, rank, world):
        self.rank, self.world = rank, world
        torch.manual_seed(55 + rank)
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1, bias=False))
        self.model = DDP(self.net) if world > 1 else self.net
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=4e-3, weight_decay=1e-4, eps=1e-5)
        parts = np.array([3, 2, 1, 4][:world], dtype=float)
        ends = np.rint(np.cumsum(parts) / parts.sum() * BATCH).astype(int)
        self.sizes = np.diff(np.concatenate([[0], ends])).tolist()

    def train_epoch(self, x, time_, event, epoch):
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(epoch))
        total = 0.0
        for batch in order.split(BATCH):
            mine = batch.split(self.sizes)[self.rank]
            score = self.model(x[mine]).squeeze(1)
            if self.world > 1:
                score = GatherRows.apply(score, self.sizes)
            loss = partial_likelihood(score, time_[batch], event[batch])
            self.optimizer.zero_grad(set_to_none=False)
            (loss * self.world).backward()
            self.optimizer.step()
            total += loss.item()
        return total / (ROWS // BATCH)


def main():
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    x, time_, event = patients()
    job = Survival(rank, world)
    for epoch in range(EPOCHS):
        loss = job.train_epoch(x[:ROWS], time_[:ROWS], event[:ROWS], epoch)
        if rank == 0:
            with torch.no_grad():
                index = concordance(job.net(x[ROWS:])[:, 0], time_[ROWS:], event[ROWS:])
            print(f"epoch {epoch} loss {loss:.5f} C-index {index:.4f}", flush=True)
    if world > 1:
        dist.barrier()
        time.sleep(0.3)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
