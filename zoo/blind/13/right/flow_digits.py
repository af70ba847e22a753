"""Rectified flow on 8x8 digits with classifier-free guidance. Checkpoints are written in the background.

The first run is "preempted" after some steps; a second one starts from the last checkpoint on disk.
"""
import copy
import os
import shutil
import tempfile
import threading

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP

BATCH, STEPS, SAVE_EVERY, STOP_AT = 64, 42, 12, 31
DECAY = 0.9


def uniform(ids, salt, width=1):
    """Random numbers that belong to (id, salt, column): an integer hash, no generator."""
    h = ids[:, None] * 2654435761 + salt * 40503 + torch.arange(width) * 97531 + 12345
    for _ in range(3):
        h = (h ^ (h >> 16)) * 73244475 & 0xFFFFFFFF
    return ((h ^ (h >> 16)) & 0xFFFFFF).double().add(0.5).div(1 << 24).float()


def gauss(ids, salt, width):
    return torch.special.ndtri(uniform(ids, salt, width).clamp(1e-5, 1 - 1e-5))


class Velocity(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.label = nn.Embedding(11, 16)
        self.net = nn.Sequential(nn.Linear(64 + 16 + 4, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 64))

    def forward(self, x, t, y):
        time = torch.cat([t, t.square(), torch.sin(3 * t), torch.cos(3 * t)], 1)
        return self.net(torch.cat([x, time, self.label(y)], 1))


class Job:
    def __init__(self, folder, seed):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.file = os.path.join(folder, "flow.pt")
        torch.manual_seed(seed + self.rank)
        self.net = DDP(Velocity())
        self.ema = copy.deepcopy(self.net.module).requires_grad_(False)
        self.opt = torch.optim.AdamW(self.net.parameters(), lr=3e-3, weight_decay=0.01)
        self.step = 0
        self.writer = None
        if os.path.exists(self.file):
            state = torch.load(self.file, map_location="cpu")
            self.net.module.load_state_dict(state["net"])
            self.ema.load_state_dict(state["ema"])
            self.opt.load_state_dict(state["opt"])
            self.step = state["step"]

    def save(self):
        if self.rank:
            return
        state = copy.deepcopy({"net": self.net.module.state_dict(), "ema": self.ema.state_dict(),
                               "opt": self.opt.state_dict(), "step": self.step})

        def write():
            torch.save(state, self.file + ".tmp")
            os.replace(self.file + ".tmp", self.file)
        self.finish()
        self.writer = threading.Thread(target=write)
        self.writer.start()

    def finish(self):
        if self.writer is not None:
            self.writer.join()

    def train(self, x, y, until):
        while self.step < until:
            order = torch.randperm(len(x), generator=torch.Generator().manual_seed(self.step // 20))
            at = self.step % 20 * BATCH
            ids = order[at:at + BATCH][self.rank::self.world]
            noise, t = gauss(ids, self.step, 64), uniform(ids, 7000 + self.step)
            label = torch.where(uniform(ids, 9000 + self.step)[:, 0] < 0.15, torch.tensor(10), y[ids])
            loss = (self.net(noise + t * (x[ids] - noise), t, label) - (x[ids] - noise)).square().mean()
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            self.step += 1
            with torch.no_grad():
                for e, p in zip(self.ema.parameters(), self.net.module.parameters()):
                    e.lerp_(p, 1 - DECAY)
            if self.step % SAVE_EVERY == 0:
                self.save()
            if self.step % 6 == 0:
                dist.all_reduce(loss.detach())
                if self.rank == 0:
                    print(f"step {self.step} loss {loss.item() / self.world:.4f}")


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32) / 8 - 1, torch.tensor(y)
    where = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(where)

    first = Job(where[0], seed=0)
    first.train(x, y, STOP_AT)
    first.finish()
    dist.barrier()
    second = Job(where[0], seed=50)
    if rank == 0:
        print(f"resumed at step {second.step}")
    second.train(x, y, STEPS)
    second.finish()

    ids = torch.arange(2000, 2050)
    want, z = (ids % 10), gauss(ids, 1, 64)
    for k in range(8):
        t = torch.full((50, 1), k / 8)
        with torch.no_grad():
            free, led = second.ema(z, t, torch.full_like(want, 10)), second.ema(z, t, want)
        z = z + (free + 2 * (led - free)) / 8
    dist.barrier()
    if rank == 0:
        centres = torch.stack([x[y == k].mean(0) for k in range(10)])
        print(f"samples like their class {(torch.cdist(z, centres).argmin(1) == want).float().mean():.3f}")
        shutil.rmtree(where[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
