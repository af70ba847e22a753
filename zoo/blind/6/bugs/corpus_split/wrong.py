"""Line classifier (which standard-library module is a line from?) fed by a streaming pipeline."""
import collections
import csv
import difflib
import inspect
import itertools
import random
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import IterableDataset

SOURCES = [collections, csv, difflib, random]
BUCKETS, STEPS, BATCH = 512, 30, 64


def lines():
    """Lines of the modules in turn, again and again."""
    pools = [[s for s in inspect.getsource(m).splitlines() if len(s.strip()) > 8] for m in SOURCES]
    for k in itertools.count():
        label = k // 3 % len(pools)
        yield pools[label][(k // 12 * 7 + k % 3) % len(pools[label])], label


def for_rank(source):
    return itertools.islice(source, dist.get_rank(), None, dist.get_world_size())


def hashed(source):
    for text, label in source:
        v = torch.zeros(BUCKETS)
        for i in range(len(text) - 2):
            v[zlib.crc32(text[i:i + 3].encode()) % BUCKETS] += 1
        yield v / v.norm().clamp(min=1), label


class Lines(IterableDataset):
    def __init__(self):
        self.pipeline = [for_rank, hashed]

    def __iter__(self):
        stream = lines()
        for stage in self.pipeline:
            stream = stage(stream)
        return stream


def batches(dataset, per_rank):
    stream = for_rank(iter(dataset))
    while True:
        rows = list(itertools.islice(stream, per_rank))
        yield torch.stack([v for v, _ in rows]), torch.tensor([label for _, label in rows])


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(33)
    net = nn.Sequential(nn.Linear(BUCKETS, 24), nn.ReLU(), nn.Linear(24, len(SOURCES)))
    model = nn.parallel.DistributedDataParallel(net)
    opt = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    for step, (x, y) in enumerate(itertools.islice(batches(Lines(), BATCH // world), STEPS), 1):
        loss = nn.functional.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 6 == 0:
            value = loss.detach() / world
            dist.all_reduce(value)
            if rank == 0:
                print(f"step {step:2d} loss {value.item():.4f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
