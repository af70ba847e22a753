"""DeepFM for clicks, trained once over a stream of events (an IterableDataset with worker processes).

The stream can only be read from the start to the end. Every worker of every process reads all of it, shuffles it in a
buffer with the same seed and keeps its part: worker w the batches w, w + workers, ..., of each the rank-th rows.
Progressive validation: every batch is scored before it is learnt.
"""
import math
import os
import random

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

FIELDS, BATCH, EVENTS, REPORT = (20, 30, 12, 7), 64, 3000, 10


def read_log():
    """One event after the other: (ids of the fields, click). 3000 events: the last 56 do not fill a batch."""
    rng = random.Random(8)
    taste = [[rng.gauss(0, 0.8) for _ in range(n)] for n in FIELDS]
    for _ in range(EVENTS):
        ids = [min(int(rng.expovariate(3 / n)), n - 1) for n in FIELDS]
        score = sum(t[i] for t, i in zip(taste, ids)) + taste[0][ids[0]] * taste[1][ids[1]] - 0.7
        yield ids, float(rng.random() < 1 / (1 + math.exp(-score)))


class EventStream(IterableDataset):
    def __init__(self, rank, world, buffer=200):
        self.rank, self.world, self.buffer = rank, world, buffer

    def shuffled(self):
        rng, held = random.Random(1), []
        for event in read_log():
            if len(held) < self.buffer:
                held.append(event)
            else:
                place = rng.randrange(self.buffer)
                held[place], event = event, held[place]
                yield event
        rng.shuffle(held)
        yield from held

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        batch, number = [], 0
        for event in self.shuffled():
            batch.append(event)
            if len(batch) == BATCH:
                if number % workers == worker:
                    ids, clicks = zip(*batch[self.rank::self.world])
                    yield torch.tensor(ids), torch.tensor(clicks)
                batch, number = [], number + 1


class DeepFM(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.register_buffer("starts", torch.tensor([sum(FIELDS[:i]) for i in range(len(FIELDS))]))
        self.linear = nn.EmbeddingBag(sum(FIELDS), 1, mode="sum")
        self.factors = nn.Embedding(sum(FIELDS), width)
        self.deep = nn.Sequential(nn.Linear(width * len(FIELDS), 24), nn.Tanh(), nn.Linear(24, 1))
        nn.init.normal_(self.factors.weight, std=0.1)
        nn.init.zeros_(self.linear.weight)

    def forward(self, ids):
        ids = ids + self.starts
        v = self.factors(ids)
        pairs = (v.sum(1).square() - v.square().sum(1)).sum(1) / 2
        return self.linear(ids)[:, 0] + pairs + self.deep(v.flatten(1))[:, 0]


def main():
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(60 + rank)
    workers = max(1, 2 // world)                           # two on the machine, or one for each process
    loader = DataLoader(EventStream(rank, world), batch_size=None, num_workers=workers, prefetch_factor=3)
    net = DeepFM()
    model = DDP(net, bucket_cap_mb=1) if world > 1 else net
    optimizer = torch.optim.Adagrad(net.parameters(), lr=0.08, initial_accumulator_value=0.01)
    window = torch.zeros(3)
    for number, (ids, clicks) in enumerate(loader, 1):
        logits = model(ids)
        loss = F.binary_cross_entropy_with_logits(logits, clicks)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        window += torch.stack([loss.detach() * len(ids), logits.detach().sigmoid().sum(), clicks.sum()])
        if number % REPORT == 0:
            total = window.clone()
            if world > 1:
                dist.all_reduce(total)
            if rank == 0:
                rows = REPORT * BATCH
                print(f"batch {number} log loss {total[0] / rows:.4f} expected clicks {total[1]:.1f} clicks {int(total[2])}")
            window.zero_()
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
