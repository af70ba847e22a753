"""Trip times from a stream of binary shards (IterableDataset, worker process, DDP).

Four shard files of very different length are written by process 0. A step takes eight
rows from every shard; a process reads the shards rank, rank + world, ... and starts a
shard anew, in a new order, when it is through. So shards are in different rounds, and
no process ever sees the rows of another one. Losses are reduced asynchronously.
"""
import itertools
import os
import shutil
import tempfile

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

SIZES, BLOCK, STEPS, ZONES = (97, 260, 61, 143), 8, 48, 30


def write_shards(folder):
    rng = np.random.default_rng(3)
    x, y = rng.random(ZONES) * 10, rng.random(ZONES) * 10
    for shard, size in enumerate(SIZES):
        start, end = rng.integers(0, ZONES, (2, size))
        hour = rng.integers(0, 24, size)
        way = np.hypot(x[start] - x[end], y[start] - y[end])
        minutes = 3 + way * (2 + np.sin(hour / 24 * 2 * np.pi)) + rng.gamma(2.0, 0.5, size) + shard
        np.save(f"{folder}/{shard}.npy", np.stack([start, end, hour, minutes], 1).astype(np.float32))


class Stream(IterableDataset):
    def __init__(self, folder, rank, world):
        self.files = [(s, f"{folder}/{s}.npy") for s in range(rank, len(SIZES), world)]

    def rows(self, shard, path):
        data = np.load(path, mmap_mode="r")
        for round_ in itertools.count():
            for i in np.random.default_rng([shard, round_]).permutation(len(data)):
                yield torch.from_numpy(np.array(data[i]))

    def __iter__(self):
        info = get_worker_info()
        assert info is None or info.num_workers == 1, "shards are shared out over processes, not over workers"
        feeds = [self.rows(*file) for file in self.files]
        while True:
            for feed in feeds:
                yield from itertools.islice(feed, BLOCK)


class Trips(nn.Module):
    def __init__(self):
        super().__init__()
        self.zone = nn.Embedding(ZONES, 12)
        self.net = nn.Sequential(nn.Linear(26, 48), nn.Softplus(), nn.Linear(48, 48), nn.Softplus(), nn.Linear(48, 1))

    def forward(self, rows):
        angle = rows[:, 2:3] / 24 * 2 * torch.pi
        zones = self.zone(rows[:, :2].long()).flatten(1)
        return 10 * self.net(torch.cat([zones, angle.sin(), angle.cos()], 1))[:, 0] + 15


def main():
    for key, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29619"}.items():
        os.environ.setdefault(key, value)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank + 50)

    folder = [tempfile.mkdtemp(prefix="trips-") if rank == 0 else None]
    if rank == 0:
        write_shards(folder[0])
    dist.broadcast_object_list(folder, src=0)       # also: files are there from here on

    stream = Stream(folder[0], rank, world)
    loader = DataLoader(stream, batch_size=BLOCK * len(stream.files), num_workers=1, prefetch_factor=4)
    model = DDP(Trips())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2, weight_decay=0.01)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)

    smooth, pending = None, None

    def collect():
        nonlocal smooth, pending
        if pending is not None:
            value, work = pending
            work.wait()
            loss = value.item() / world
            smooth, pending = (loss if smooth is None else 0.9 * smooth + 0.1 * loss), None

    for step, rows in enumerate(itertools.islice(loader, STEPS)):
        loss = nn.functional.smooth_l1_loss(model(rows), rows[:, 3])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 20.0)
        optimizer.step()
        warm.step()
        collect()                                   # that of the step before
        value = loss.detach().double().clone()
        pending = value, dist.all_reduce(value, async_op=True)
        if step % 12 == 11:
            collect()
            if rank == 0:
                print(f"step {step + 1}: running loss {smooth:.4f}")
    del loader

    errors = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for _, path in stream.files:
            rows = torch.from_numpy(np.load(path))
            errors += torch.stack([(model.module(rows) - rows[:, 3]).abs().sum(), torch.tensor(float(len(rows)))])
    dist.all_reduce(errors)
    if rank == 0:
        print(f"mean error of {int(errors[1])} trips: {errors[0] / errors[1]:.4f} minutes")
        shutil.rmtree(folder[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
