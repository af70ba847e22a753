"""Digits classifier that can be preempted in the middle of an epoch.

The job here plays both halves: it trains until the notice comes, writes a checkpoint, builds everything anew,
loads the checkpoint and goes on to the last step.
"""
import os
import shutil
import tempfile
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Sampler, TensorDataset

TOTAL_STEPS, NOTICE_AT = 46, 21
GLOBAL_BATCH = 64


class ResumableSampler(Sampler):
    """A permutation per epoch, dealt to the processes; can begin after the samples that were already used."""

    def __init__(self, size, rank, world, seed):
        self.size, self.rank, self.world, self.seed = size, rank, world, seed
        self.epoch, self.consumed = 0, 0

    def __len__(self):
        return (self.size - self.consumed) // self.world

    def __iter__(self):
        gen = torch.Generator().manual_seed(self.seed * 1000 + self.epoch)
        order = torch.randperm(self.size, generator=gen).tolist()
        return iter(order[self.rank::self.world][self.consumed:])


class Job:
    def __init__(self, rank, world):
        self.rank, self.world = rank, world
        torch.manual_seed(15)
        self.model = DDP(nn.Sequential(nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 10)))
        self.opt = torch.optim.SGD(self.model.parameters(), lr=0.2, momentum=0.9)
        self.sched = torch.optim.lr_scheduler.CosineAnnealingLR(self.opt, TOTAL_STEPS)
        x, y = load_digits(return_X_y=True)
        self.x, self.y = torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y)
        train = TensorDataset(self.x[:1024], self.y[:1024])
        self.sampler = ResumableSampler(len(train), rank, world, seed=3)
        self.loader = DataLoader(train, batch_size=GLOBAL_BATCH // world, sampler=self.sampler)
        self.step = 0

    def save(self, path):
        if self.rank == 0:
            torch.save({"model": self.model.module.state_dict(), "opt": self.opt.state_dict(),
                        "sched": self.sched.state_dict(), "step": self.step,
                        "epoch": self.sampler.epoch, "consumed": self.sampler.consumed}, path)
        dist.barrier()

    def load(self, path):
        ckpt = torch.load(path)
        self.model.module.load_state_dict(ckpt["model"])
        self.opt.load_state_dict(ckpt["opt"])
        self.sched.load_state_dict(ckpt["sched"])
        self.step = ckpt["step"]
        self.sampler.epoch, self.sampler.consumed = ckpt["epoch"], ckpt["consumed"]

    def train(self, until):
        while self.step < until:
            used = self.sampler.consumed
            for x, y in self.loader:
                loss = F.cross_entropy(self.model(x), y)
                self.opt.zero_grad()
                loss.backward()
                self.opt.step()
                self.sched.step()
                self.step += 1
                used += len(x) * self.world
                if self.step == until:
                    self.sampler.consumed = used
                    return
            self.sampler.epoch += 1
            self.sampler.consumed = 0
            self.report()

    def report(self):
        with torch.no_grad():
            nll = F.cross_entropy(self.model.module(self.x[1024:]), self.y[1024:]).item()
        if self.rank == 0:
            print(f"step {self.step} epoch {self.sampler.epoch} test nll {nll:.5f}", flush=True)


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    path = os.path.join(folder[0], "digits.pt")

    job = Job(rank, world)
    job.train(NOTICE_AT)
    job.save(path)
    job = Job(rank, world)
    job.load(path)
    job.train(TOTAL_STEPS)
    job.report()

    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder[0])
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
