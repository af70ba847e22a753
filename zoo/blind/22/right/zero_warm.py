"""Convolutional digit classifier with DDP, ZeRO optimizer state sharding and a restart in the middle.

BatchNorm is the plain one: every process normalises with its own part of the batch (as in the
reference ImageNet recipe), so results depend slightly on the number of processes.  The running
statistics are averaged before evaluation and before saving.
"""
import math
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

BATCH, EPOCHS, WARMUP = 64, 4, 10


def load():
    raw = load_digits()
    x = torch.tensor(raw.images / 8.0 - 1.0, dtype=torch.float32).unsqueeze(1)
    y = torch.tensor(raw.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    return x[:1280], y[:1280], x[1280:], y[1280:]


def conv_net():
    def unit(a, b, stride):
        return nn.Sequential(nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU())

    return nn.Sequential(unit(1, 12, 1), unit(12, 24, 2), unit(24, 24, 2), nn.Flatten(), nn.Linear(96, 10))


class Trainer:
    def __init__(self, total_steps):
        torch.manual_seed(6)
        self.net = DDP(conv_net())
        self.opt = ZeroRedundancyOptimizer(self.net.parameters(), torch.optim.Adam, lr=4e-3)
        self.sched = torch.optim.lr_scheduler.LambdaLR(self.opt, self.factor(total_steps))
        self.epoch = 0

    @staticmethod
    def factor(total):
        def f(step):
            if step < WARMUP:
                return (step + 1) / WARMUP
            return 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (total - WARMUP)))
        return f

    def average_buffers(self):
        for b in self.net.module.buffers():
            if b.is_floating_point():
                dist.all_reduce(b)
                b /= dist.get_world_size()

    def save(self, path):
        self.opt.consolidate_state_dict(to=0)
        if dist.get_rank() == 0:
            torch.save({"net": self.net.module.state_dict(), "opt": self.opt.state_dict(),
                        "sched": self.sched.state_dict(), "epoch": self.epoch}, path)
        dist.barrier()

    def load(self, path):
        state = torch.load(path)
        self.net.module.load_state_dict(state["net"])
        self.opt.load_state_dict(state["opt"])
        self.sched.load_state_dict(state["sched"])
        self.epoch = state["epoch"]
        dist.barrier()

    def train_epoch(self, x, y):
        rank, world = dist.get_rank(), dist.get_world_size()
        self.net.train()
        perm = torch.randperm(len(x), generator=torch.Generator().manual_seed(100 + self.epoch))
        for rows in perm.split(BATCH):
            mine = rows[rank::world]
            self.opt.zero_grad()
            F.cross_entropy(self.net(x[mine]), y[mine], label_smoothing=0.05).backward()
            self.opt.step()
            self.sched.step()
        self.average_buffers()
        self.epoch += 1

    @torch.no_grad()
    def accuracy(self, x, y):
        self.net.eval()
        part = slice(dist.get_rank(), None, dist.get_world_size())
        counts = torch.stack([(self.net.module(x[part]).argmax(1) == y[part]).sum(), torch.tensor(len(y[part]))])
        dist.all_reduce(counts)
        return (counts[0] / counts[1]).item()


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    train_x, train_y, test_x, test_y = load()
    total = EPOCHS * math.ceil(len(train_x) / BATCH)
    where = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(where, src=0)
    path = os.path.join(where[0], "half.pt")

    trainer = Trainer(total)
    while trainer.epoch < EPOCHS // 2:
        trainer.train_epoch(train_x, train_y)
    trainer.save(path)

    trainer = Trainer(total)
    trainer.load(path)
    while trainer.epoch < EPOCHS:
        trainer.train_epoch(train_x, train_y)
        acc = trainer.accuracy(test_x, test_y)
        if dist.get_rank() == 0:
            print(f"epoch {trainer.epoch} test accuracy {acc:.4f} lr {trainer.sched.get_last_lr()[0]:.2e}")
    if dist.get_rank() == 0:
        os.remove(path)
        os.rmdir(where[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
