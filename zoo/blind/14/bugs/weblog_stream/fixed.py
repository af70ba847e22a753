"""Response times of a web shop, learnt from a stream of log lines through a shuffle buffer.

The log is read line by line; a buffer of 256 lines loosens the order, then the lines are shared out to the processes.
Run with `python` or `torchrun`; a step takes 64 lines over all processes.
"""
import argparse
import itertools
import os
import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

PAGES, HOURS = 30, 24


def log_lines(count, seed):
    """Lines in order of time: page, hour of the day, length of the basket, milliseconds."""
    rng = random.Random(seed)
    base = [rng.uniform(0.5, 3.0) for _ in range(PAGES)]
    for i in range(count):
        hour = i * HOURS // count
        page = min(int(rng.expovariate(0.12)), PAGES - 1)
        basket = rng.randrange(0, 12)
        rush = 1.0 + (0.8 if 17 <= hour <= 21 else 0.0)
        yield page, hour, float(basket), base[page] * rush + 0.05 * basket + rng.gauss(0, 0.1)


class ShuffledLog(IterableDataset):
    def __init__(self, count, rank, world, seed, buffer_size=256):
        self.count, self.rank, self.world = count, rank, world
        self.seed, self.buffer_size, self.epoch = seed, buffer_size, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def shuffled(self):
        rng = random.Random(1000 * self.seed + self.epoch)
        buffer = []
        for line in log_lines(self.count, seed=17):
            if len(buffer) < self.buffer_size:
                buffer.append(line)
                continue
            place = rng.randrange(self.buffer_size)
            yield buffer[place]
            buffer[place] = line
        rng.shuffle(buffer)
        yield from buffer

    def __iter__(self):
        return itertools.islice(self.shuffled(), self.rank, None, self.world)


def collate(lines):
    page, hour, basket, time = zip(*lines)
    return torch.tensor(page), torch.tensor(hour), torch.tensor(basket), torch.tensor(time)


class Latency(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.page = nn.Embedding(PAGES, width)
        self.hour = nn.Embedding(HOURS, width)
        self.net = nn.Sequential(nn.Linear(2 * width + 1, 48), nn.ReLU(), nn.Linear(48, 1))

    def forward(self, page, hour, basket):
        x = torch.cat([self.page(page), self.hour(hour), basket[:, None] / 10], 1)
        return self.net(x).squeeze(1)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--lines", type=int, default=1536)
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--epochs", type=int, default=2)
    p.add_argument("--lr", type=float, default=0.05)
    p.add_argument("--seed", type=int, default=1)
    args = p.parse_args()

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29622")
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    seed = args.seed + rank
    torch.manual_seed(seed)

    stream = ShuffledLog(args.lines, rank, world, seed=args.seed)
    loader = DataLoader(stream, batch_size=args.batch // world, collate_fn=collate)
    model = DistributedDataParallel(Latency())
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    step, total = 0, torch.zeros(())
    for epoch in range(args.epochs):
        stream.set_epoch(epoch)
        for page, hour, basket, time in loader:
            loss = F.smooth_l1_loss(model(page, hour, basket), time)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            total += loss.detach()
            if step % 12 == 0:
                dist.all_reduce(total)
                if rank == 0:
                    print(f"step {step}: loss {total.item() / world / 12:.5f}")
                total.zero_()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
