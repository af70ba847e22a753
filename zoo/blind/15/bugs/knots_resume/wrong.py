"""Tells knotted from unknotted closed curves, on curves that are made up on the fly.

Eight generators ("lanes") make curves without end, each from a stream of random numbers of its
own; a process runs its part of the lanes. The job stops after half of the steps, and a second
job goes on from the checkpoint.
"""
import os
import shutil
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

LANES, ROWS, STEPS, STOP = 8, 6, 40, 20
POINTS = 24


class Lane:
    """Noisy, turned curves of one generator; label 1 is a trefoil, 0 a wavy ring."""

    def __init__(self, number):
        self.number = number
        self.generator = torch.Generator().manual_seed(900 + number)

    def batch(self):
        g = self.generator
        t = torch.linspace(0, 2 * torch.pi, POINTS + 1)[:-1] + 2 * torch.pi * torch.rand(ROWS, 1, generator=g)
        label = torch.randint(2, (ROWS,), generator=g)
        knot = torch.stack([t.sin() + 2 * (2 * t).sin(), t.cos() - 2 * (2 * t).cos(), -(3 * t).sin()], -1) / 2
        ring = torch.stack([1.5 * t.sin(), 1.5 * t.cos(), 0.5 * (3 * t).sin()], -1)
        curve = torch.where(label[:, None, None] == 1, knot, ring)
        turn, _ = torch.linalg.qr(torch.randn(ROWS, 3, 3, generator=g))
        return curve @ turn + 0.4 * torch.randn(curve.shape, generator=g), label


def build():
    return nn.Sequential(nn.Conv1d(3, 16, 5, padding=2, padding_mode="circular"), nn.ReLU(),
                         nn.Conv1d(16, 16, 5, padding=2, padding_mode="circular"), nn.ReLU(),
                         nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(16, 2))


class Job:
    def __init__(self, path, rank, world):
        self.path, self.rank, self.world, self.step = path, rank, world, 0
        self.lanes = [Lane(n) for n in range(LANES) if n % world == rank]
        torch.manual_seed(0)
        model = build()
        self.optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
        self.model, self.net = model, DDP(model)

    def save(self):
        lanes = {f"lane{i}": lane.generator.get_state() for i, lane in enumerate(self.lanes)}
        if self.rank == 0:
            torch.save({"step": self.step, "model": self.model.state_dict(),
                        "optimizer": self.optimizer.state_dict(), "lanes": lanes}, self.path)
        dist.barrier()

    def load(self):
        state = torch.load(self.path, weights_only=True)
        self.step = state["step"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for i, lane in enumerate(self.lanes):
            lane.generator.set_state(state["lanes"][f"lane{i}"])

    def run(self, until):
        while self.step < until:
            curves, labels = map(torch.cat, zip(*(lane.batch() for lane in self.lanes)))
            logits = self.net(curves.transpose(1, 2))
            loss = F.cross_entropy(logits, labels)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.step += 1
            if self.step % 5 == 0:
                value = loss.detach().clone()
                dist.all_reduce(value)
                if self.rank == 0:
                    print(f"step {self.step} loss {value.item() / self.world:.5f}", flush=True)


def main():
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29629")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_default_dtype(torch.float64)
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    path = os.path.join(folder[0], "knots.pt")

    first = Job(path, rank, world)
    first.run(STOP)
    first.save()
    second = Job(path, rank, world)
    second.load()
    second.run(STEPS)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
