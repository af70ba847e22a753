"""Vessel type from harbour radar tracks, with replay of last year's tracks.

Three quarters of every batch come from this year's stream, one quarter from the archive,
so that the vessel types that have become rare are not forgotten. Both are long streams
that are shuffled in a window while they are read.
"""
import os
import random
import time
from itertools import islice

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

TYPES = 6
POINTS = 10
NEW, OLD = 24, 8
STEPS = 40


def tracks(count, seed, skew):
    """(points, 2) positions, class; `skew` makes the later types rarer."""
    rng = np.random.default_rng(seed)
    weight = np.exp(-skew * np.arange(TYPES))
    label = rng.choice(TYPES, size=count, p=weight / weight.sum())
    speed = 0.4 + 0.25 * label + 0.1 * rng.normal(size=count)
    bend = 0.05 * (label % 3) + 0.05 * rng.normal(size=count)
    time_ = np.arange(POINTS)
    angle = rng.uniform(-1, 1, size=count)[:, None] + bend[:, None] * time_
    move = speed[:, None, None] * np.stack([np.cos(angle), np.sin(angle)], axis=-1)
    return np.cumsum(move, axis=1).astype(np.float32), label


def window_shuffle(items, size, seed):
    rng = random.Random(seed)
    window = []
    for item in items:
        window.append(item)
        if len(window) == size:
            yield window.pop(rng.randrange(size))
    rng.shuffle(window)
    yield from window


class HarbourStream(IterableDataset):
    def __init__(self, current, archive, rank, world, seed):
        self.current, self.archive = current, archive
        self.rank, self.world, self.seed = rank, world, seed

    def shuffled(self, source, seed):
        return window_shuffle(zip(*source), 64, seed)

    def __iter__(self):
        new = islice(self.shuffled(self.current, self.seed), self.rank, None, self.world)
        old = self.shuffled(self.archive, self.seed + 1)
        while True:
            part = list(islice(new, NEW // self.world))
            part += list(islice(old, OLD // self.world))
            if len(part) < (NEW + OLD) // self.world:
                return
            yield part


def collate(part):
    track, label = zip(*part)
    return torch.from_numpy(np.stack(track)), torch.tensor([int(k) for k in label])


class TrackNet(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.conv = nn.Conv1d(2, width, 3)
        self.hidden = nn.Linear(width, width)
        self.out = nn.Linear(width, TYPES)

    def forward(self, track):
        steps = track[:, 1:] - track[:, :-1]
        x = torch.tanh(self.conv(steps.transpose(1, 2))).mean(dim=2)
        return self.out(torch.tanh(self.hidden(x)))


def setup():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.get_rank(), dist.get_world_size()


def main():
    rank, world = setup()
    torch.manual_seed(4)
    net = DistributedDataParallel(TrackNet())
    optimizer = torch.optim.RMSprop(net.parameters(), lr=2e-3, alpha=0.95, eps=1e-4)
    stream = HarbourStream(tracks(STEPS * NEW, 50, skew=0.8), tracks(STEPS * OLD, 51, skew=0.0),
                           rank, world, seed=6)
    loader = DataLoader(stream, batch_size=None, collate_fn=collate)
    criterion = nn.CrossEntropyLoss()

    for step, (track, label) in enumerate(loader):
        loss = criterion(net(track), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 8 == 0:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step:2d} loss {mean.item() / world:.4f}", flush=True)

    track, label = tracks(900, 52, skew=0.0)
    with torch.no_grad():
        logits = net.module(torch.from_numpy(track))
    if rank == 0:
        loss = criterion(logits, torch.from_numpy(label)).item()
        hits = (logits.argmax(1).numpy() == label).mean()
        print(f"all types alike: loss {loss:.4f}, accuracy {hits:.3f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
