"""Classifier of cultivated iris and wine tables in one: trained in two sittings, with a break in the middle of an epoch.

The bookmark holds all that is needed to go on: weights, optimizer, schedule, the order of the present epoch, the place in
it (in samples) and the state of the dice.
"""
import os
import shutil
import tempfile
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_iris, load_wine
from torch.nn.parallel import DistributedDataParallel as DDP

BATCH, TOTAL, BREAK_AT = 32, 42, 19


def table():
    """Both tables side by side: 17 columns, 6 classes; absent columns are zero."""
    a, b = load_wine(), load_iris()
    xa, xb = [(d.data - d.data.mean(0)) / d.data.std(0) for d in (a, b)]
    x = np.zeros((len(xa) + len(xb), 17), dtype=np.float32)
    x[:len(xa), :13], x[len(xa):, 13:] = xa, xb
    y = np.concatenate([a.target, 3 + b.target])
    mix = np.random.default_rng(6).permutation(len(x))
    x, y = torch.tensor(x[mix]), torch.tensor(y[mix])
    return (x[:264], y[:264]), (x[264:], y[264:])


class Sitting:
    def __init__(self, rank, world, seed):
        self.rank, self.world = rank, world
        (self.x, self.y), self.test = table()
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(17, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 6))
        self.ddp = DDP(self.net)
        self.opt = torch.optim.NAdam(self.net.parameters(), lr=5e-3, eps=1e-6)
        self.sched = torch.optim.lr_scheduler.CosineAnnealingLR(self.opt, T_max=TOTAL)
        self.dice = np.random.default_rng(seed)
        self.order, self.place, self.steps, self.epoch = np.arange(0), 0, 0, -1

    def next_rows(self):
        if self.place + BATCH > len(self.order):
            self.order, self.place, self.epoch = self.dice.permutation(len(self.x)), 0, self.epoch + 1
        rows = self.order[self.place:self.place + BATCH]
        shake = self.dice.normal(0, 0.05, (BATCH, 17)).astype(np.float32)
        self.place += BATCH
        share = BATCH // self.world
        cut = slice(self.rank * share, (self.rank + 1) * share)
        return torch.from_numpy(rows[cut].copy()), torch.from_numpy(shake[cut])

    def train_until(self, last):
        while self.steps < last:
            rows, shake = self.next_rows()
            loss = F.cross_entropy(self.ddp(self.x[rows] + shake), self.y[rows], label_smoothing=0.05)
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            self.sched.step()
            self.steps += 1
            if self.steps % 7 == 0:
                dist.all_reduce(shown := loss.detach() / self.world)
                if self.rank == 0:
                    print(f"step {self.steps}  epoch {self.epoch} +{self.place}  loss {shown.item():.6f}", flush=True)

    def bookmark(self, path):
        if self.rank == 0:
            torch.save({"net": self.net.state_dict(), "opt": self.opt.state_dict(), "sched": self.sched.state_dict(),
                        "dice": self.dice.bit_generator.state, "order": self.order.tolist(), "place": self.place,
                        "steps": self.steps, "epoch": self.epoch}, path + ".part")
            os.replace(path + ".part", path)
        dist.barrier()

    def resume(self, path):
        mark = torch.load(path, weights_only=False)
        self.net.load_state_dict(mark["net"])
        self.opt.load_state_dict(mark["opt"])
        self.sched.load_state_dict(mark["sched"])
        self.dice.bit_generator.state = mark["dice"]
        self.order, self.place = np.array(mark["order"]), mark["place"]
        self.steps, self.epoch = mark["steps"], mark["epoch"]

    @torch.no_grad()
    def accuracy(self):
        x, y = self.test
        part = slice(self.rank, None, self.world)
        out = torch.stack([(self.net(x[part]).argmax(1) == y[part]).sum(), torch.tensor(len(y[part]))])
        dist.all_reduce(out)
        return out[0].item() / out[1].item()


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    folder = [tempfile.mkdtemp(prefix="sitting") if rank == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    path = os.path.join(folder[0], "bookmark.pt")

    first = Sitting(rank, world, seed=1)
    first.train_until(BREAK_AT)
    first.bookmark(path)
    del first

    second = Sitting(rank, world, seed=12345 + rank)
    second.resume(path)
    second.train_until(TOTAL)
    score = second.accuracy()
    dist.barrier()
    if rank == 0:
        print(f"accuracy {score:.4f}", flush=True)
        shutil.rmtree(folder[0])
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
