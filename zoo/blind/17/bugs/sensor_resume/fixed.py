"""Predict wear from a stream of sensor readings; the job is cut in two and resumed in between."""
import os
import shutil
import tempfile
from itertools import islice

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

BATCH, CUT, STEPS = 32, 12, 30


class Stream:
    """A lazily read sequence of readings, with the usual shard and skip."""

    def __init__(self, source, stages=()):
        self.source, self.stages = source, stages

    def shard(self, count, index):
        return Stream(self.source, self.stages + ((index, count),))

    def skip(self, count):
        return Stream(self.source, self.stages + ((count, 1),))

    def __iter__(self):
        rows = self.source()
        for start, step in self.stages:
            rows = islice(rows, start, None, step)
        return iter(rows)

    def batches(self, size):
        rows = iter(self)
        while True:
            chunk = list(islice(rows, size))
            yield torch.stack([x for x, _ in chunk]), torch.stack([y for _, y in chunk])


def readings():
    g = torch.Generator().manual_seed(140)
    direction = torch.randn(8, generator=g)
    hours = 0
    while True:
        hours += 1
        x = torch.randn(8, generator=g) + hours / 800
        yield x, torch.tanh(x @ direction / 3) + 0.1 * x[0] * x[1] + hours / 1500


def network():
    torch.manual_seed(35)
    return nn.Sequential(nn.Linear(8, 32), nn.SiLU(), nn.Linear(32, 16), nn.SiLU(), nn.Linear(16, 1))


def job(first, last, path, rank, world):
    net = network()
    optimizer = torch.optim.AdamW(net.parameters(), lr=5e-3, weight_decay=0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=STEPS)
    consumed = 0
    if first:
        saved = torch.load(path, weights_only=True)
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
        consumed = saved["consumed"]
    model = DDP(net) if world > 1 else net
    stream = Stream(readings).skip(consumed).shard(world, rank)

    for step, (x, y) in zip(range(first, last), stream.batches(BATCH // world)):
        loss = (model(x).squeeze(1) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        consumed += BATCH
        if step % 6 == 5:
            shown = loss.detach() / world
            if world > 1:
                dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step + 1:2d} readings {consumed:4d} loss {shown.item():.8f}")

    if rank == 0:
        torch.save({
            "net": net.state_dict(), "optimizer": optimizer.state_dict(),
            "schedule": schedule.state_dict(), "consumed": consumed,
        }, path)
    if world > 1:
        dist.barrier()
    return net


def main():
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.set_default_dtype(torch.float64)
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    if world > 1:
        dist.broadcast_object_list(folder, src=0)
    path = os.path.join(folder[0], "job.pt")

    job(0, CUT, path, rank, world)
    net = job(CUT, STEPS, path, rank, world)
    if rank == 0:
        size = sum(p.detach().square().sum() for p in net.parameters()).sqrt()
        print(f"weights {size.item():.10f}")
        shutil.rmtree(folder[0])
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
