"""Anomaly scores for service log lines, streamed from shards through an IterableDataset."""
import os
import random
import zlib

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset

SHARDS, LINES_PER_SHARD = 16, 64
BUCKETS = 128
BATCH = 32
EPOCHS = 3

SERVICES = ["auth", "cart", "search", "mail", "billing"]
GOOD = ["request served", "cache hit", "session opened", "job finished", "index refreshed"]
BAD = ["timeout upstream", "retry exhausted", "checksum mismatch", "disk almost full"]


def write_shards():
    rng = random.Random(2024)
    shards = []
    for shard in range(SHARDS):
        rows = []
        bad_rate = 0.1 + 0.4 * shard / SHARDS
        for _ in range(LINES_PER_SHARD):
            bad = rng.random() < bad_rate
            phrase = rng.choice(BAD if bad != (rng.random() < 0.05) else GOOD)
            line = f"{rng.choice(SERVICES)} shard{shard % 4} {phrase} code{rng.randrange(40)}"
            rows.append((line, float(bad)))
        shards.append(rows)
    return shards


def featurize(line):
    x = torch.zeros(BUCKETS)
    words = line.split()
    for token in words + [a + "_" + b for a, b in zip(words, words[1:])]:
        x[zlib.crc32(token.encode()) % BUCKETS] += 1.0
    return x


class LogStream(IterableDataset):
    def __init__(self, shards, rank, world, seed=0):
        self.shards, self.rank, self.world, self.seed = shards, rank, world, seed
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def _lines(self):
        rng = random.Random(self.seed + 1000 * self.epoch + self.rank)
        names = list(range(len(self.shards)))
        rng.shuffle(names)
        for name in names:
            rows = list(self.shards[name])
            rng.shuffle(rows)
            yield from rows

    def __iter__(self):
        for position, (line, label) in enumerate(self._lines()):
            if position % self.world == self.rank:
                yield featurize(line), torch.tensor(label)


class Scorer(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(BUCKETS, 48)
        self.out = nn.Linear(48, 1)

    def forward(self, x):
        return self.out(F.relu(self.hidden(x))).squeeze(-1)


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()

    stream = LogStream(write_shards(), rank, world, seed=31)
    loader = DataLoader(stream, batch_size=BATCH // world)
    torch.manual_seed(0)
    model = DDP(Scorer())
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.03)

    for epoch in range(EPOCHS):
        stream.set_epoch(epoch)
        stats = torch.zeros(3)
        for x, y in loader:
            logits = model(x)
            loss = F.binary_cross_entropy_with_logits(logits, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            hits = ((logits > 0) == (y > 0.5)).sum()
            stats += torch.stack([loss.detach() * len(y), hits.float(), torch.tensor(float(len(y)))])
        dist.all_reduce(stats)
        if rank == 0:
            print(f"epoch {epoch} loss {stats[0] / stats[2]:.5f} accuracy {stats[1] / stats[2]:.4f} lines {int(stats[2])}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
