"""Momentum contrast on sensor windows: key encoder by EMA, a queue of keys from all processes, ridge probe at the end.

The two views of a window are drawn from a stream named by (epoch, window), so that a window
is distorted in the same way wherever it is processed.
"""
import copy
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

CLASSES, LENGTH = 6, 64
BATCH, QUEUE, EPOCHS = 64, 256, 4
TEMPERATURE, MOMENTUM = 0.2, 0.97

rank = int(os.environ.get("RANK", 0))
world = int(os.environ.get("WORLD_SIZE", 1))
distributed = world > 1


def windows(count, seed):
    g = torch.Generator().manual_seed(seed)
    label = torch.randint(CLASSES, (count,), generator=g)
    t = torch.arange(LENGTH) / LENGTH
    freq = (label + 2)[:, None] * (1 + 0.05 * torch.randn(count, 1, generator=g))
    phase = 2 * math.pi * torch.rand(count, 1, generator=g)
    base = torch.sin(2 * math.pi * freq * t + phase)
    second = torch.where(label[:, None] % 2 == 0, base.square(), base.abs().sqrt())
    return torch.stack([base, second], 1) + 0.1 * torch.randn(count, 2, LENGTH, generator=g), label


def distort(x, g):
    gain = 0.7 + 0.6 * torch.rand(2, 1, generator=g)
    shift = int(torch.randint(LENGTH, (1,), generator=g))
    return torch.roll(x, shift, dims=1) * gain + 0.1 * torch.randn(x.shape, generator=g)


def two_views(x, ids, epoch):
    pairs = []
    for i in ids.tolist():
        g = torch.Generator().manual_seed(1_000_003 * epoch + i)
        pairs.append((distort(x[i], g), distort(x[i], g)))
    return torch.stack([a for a, _ in pairs]), torch.stack([b for _, b in pairs])


class Encoder(nn.Module):
    def __init__(self, out=16):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv1d(2, 16, 7, stride=2), nn.GroupNorm(4, 16), nn.ReLU(),
            nn.Conv1d(16, 32, 5, stride=2), nn.GroupNorm(4, 32), nn.ReLU())
        self.project = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, out))

    def features(self, x):
        return self.conv(x).mean(-1)

    def forward(self, x):
        return F.normalize(self.project(self.features(x)), dim=1)


def gather(t):
    if not distributed:
        return t
    parts = [torch.empty_like(t) for _ in range(world)]
    dist.all_gather(parts, t.contiguous())
    return torch.cat(parts)


def reduce(t):
    if distributed:
        dist.all_reduce(t)
    return t


@torch.no_grad()
def probe(encoder, train, test):
    """Accuracy of a ridge classifier on frozen features, its normal equations summed over the processes."""
    (x, y), (xt, yt) = train, test
    f = F.pad(encoder.features(x[rank::world]), (0, 1), value=1.0)
    onehot = F.one_hot(y[rank::world], CLASSES).to(f.dtype)
    a, b = reduce(f.T @ f), reduce(f.T @ onehot)
    w = torch.linalg.solve(a + 1e-2 * torch.eye(len(a)), b)
    guess = (F.pad(encoder.features(xt[rank::world]), (0, 1), value=1.0) @ w).argmax(1)
    return reduce((guess == yt[rank::world]).sum()).item() / len(yt)


def main():
    if distributed:
        dist.init_process_group("gloo")
    torch.manual_seed(21)
    query = Encoder()
    key = copy.deepcopy(query).requires_grad_(False)
    queue = F.normalize(torch.randn(QUEUE, 16), dim=1)
    pointer = 0
    model = DistributedDataParallel(query) if distributed else query
    train, test = windows(512, 1), windows(205, 2)
    opt = torch.optim.SGD(query.parameters(), lr=0.3, momentum=0.9, weight_decay=1e-4)
    order = torch.Generator().manual_seed(33)
    share = BATCH // world

    for epoch in range(EPOCHS):
        opt.param_groups[0]["lr"] = 0.15 * (1 + math.cos(math.pi * epoch / EPOCHS))
        total = torch.zeros(2)
        for batch in torch.randperm(512, generator=order).split(BATCH):
            ids = batch[rank * share : (rank + 1) * share]
            v1, v2 = two_views(train[0], ids, epoch)
            q = model(v1)
            with torch.no_grad():
                for pk, pq in zip(key.parameters(), query.parameters()):
                    pk.mul_(MOMENTUM).add_(pq, alpha=1 - MOMENTUM)
                k = key(v2)
            logits = torch.cat([(q * k).sum(1, keepdim=True), q @ queue.T], 1) / TEMPERATURE
            loss = F.cross_entropy(logits, torch.zeros(share, dtype=torch.long))
            opt.zero_grad()
            loss.backward()
            opt.step()
            queue = queue.clone()
            queue[pointer : pointer + BATCH] = gather(k)
            pointer = (pointer + BATCH) % QUEUE
            total += torch.tensor([loss.item(), (logits.argmax(1) == 0).sum().item() / share])
        total = reduce(total) / (world * 512 / BATCH)
        acc = probe(query, train, test)
        if rank == 0:
            print(f"epoch {epoch}: loss {total[0]:.6f}  top-1 {total[1]:.4f}  probe {acc:.4f}")
    if distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
