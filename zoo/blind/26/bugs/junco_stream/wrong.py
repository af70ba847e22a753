"""Online regression on an endless telemetry stream, stopped and resumed from a checkpoint.

The job is pre-empted after the first leg; the second leg builds everything
anew, loads the checkpoint and goes on with the stream where it stopped.
"""
import itertools
import os
import random
import shutil
import tempfile
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

BATCH = 32
LEG = 20


def telemetry(seed=0):
    """Slowly drifting plant: speed, load, temperature -> vibration."""
    rng = random.Random(seed)
    wear = 0.0
    while True:
        wear += 0.0008
        row = [rng.gauss(0, 1) for _ in range(6)]
        noise = 0.1 * rng.gauss(0, 1)
        yield row, row[0] * row[1] * (0.5 + wear) + 0.7 * abs(row[2]) - wear * row[3] + noise


class TelemetryStream(IterableDataset):
    def __init__(self, rank, world, consumed=0):
        self.rank, self.world, self.consumed = rank, world, consumed

    def __iter__(self):
        mine = itertools.islice(telemetry(), self.rank, None, self.world)
        for row, target in itertools.islice(mine, self.consumed, None):
            yield torch.tensor(row), torch.tensor(target)


class Job:
    def __init__(self, rank, world):
        self.rank, self.world = rank, world
        torch.manual_seed(15)
        self.net = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
        self.opt = torch.optim.Adam(self.net.parameters(), lr=5e-3)
        self.step, self.consumed = 0, 0

    def save(self, path):
        if self.rank == 0:
            torch.save({"net": self.net.state_dict(), "opt": self.opt.state_dict(),
                        "step": self.step, "consumed": self.consumed}, path)
        if self.world > 1:
            dist.barrier()

    def load(self, path):
        ckpt = torch.load(path)
        self.net.load_state_dict(ckpt["net"])
        self.opt.load_state_dict(ckpt["opt"])
        self.step, self.consumed = ckpt["step"], ckpt["consumed"]

    def average(self, tensor):
        if self.world > 1:
            dist.all_reduce(tensor)
            tensor /= self.world
        return tensor

    def run(self, until):
        stream = TelemetryStream(self.rank, self.world, self.consumed)
        loader = DataLoader(stream, batch_size=BATCH // self.world)
        for x, y in loader:
            loss = (self.net(x).squeeze(1) - y).pow(2).mean()
            self.opt.zero_grad()
            loss.backward()
            for p in self.net.parameters():
                self.average(p.grad)
            self.opt.step()
            self.step += 1
            self.consumed += BATCH
            if self.step % 8 == 0:
                shown = self.average(loss.detach()).item()
                if self.rank == 0:
                    print(f"step {self.step} records {self.consumed} loss {shown:.5f}")
            if self.step == until:
                return


def main():
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    folder = [tempfile.mkdtemp(prefix="telemetry") if rank == 0 else None]
    if world > 1:
        dist.broadcast_object_list(folder)
    path = os.path.join(folder[0], "job.pt")

    first = Job(rank, world)
    first.run(until=LEG)
    first.save(path)
    del first

    job = Job(rank, world)
    job.load(path)
    job.run(until=2 * LEG)

    rows = list(itertools.islice(telemetry(), 2 * LEG * BATCH, 2 * LEG * BATCH + 256))
    x, y = torch.tensor([r for r, _ in rows]), torch.tensor([t for _, t in rows])
    with torch.no_grad():
        mse = (job.net(x).squeeze(1) - y).pow(2).mean().item()
    if rank == 0:
        print(f"mse on the next 256 records {mse:.5f}")
    if world > 1:
        time.sleep(0.3)
        dist.destroy_process_group()
    if rank == 0:
        shutil.rmtree(folder[0])


if __name__ == "__main__":
    main()
