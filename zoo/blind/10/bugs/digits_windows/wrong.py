# Digits with gradient accumulation; the work of one window is dealt out to the processes.
import os
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

MICRO = 16          # rows of a micro-batch
ACCUM = 8           # micro-batches of a window
WINDOWS = 60

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29702")


class Trainer:
    def __init__(self):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        if ACCUM % self.world:
            raise SystemExit("the number of processes must divide the window")
        self.share = ACCUM // self.world
        x, y = load_digits(return_X_y=True)
        self.x = torch.tensor(x / 16.0, dtype=torch.float32)
        self.y = torch.tensor(y)
        torch.manual_seed(0)
        self.model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10)))
        self.criterion = nn.CrossEntropyLoss()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.2, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, WINDOWS)
        self.shuffle = torch.Generator().manual_seed(5)

    def window(self):
        """The micro-batches of the next window that are ours."""
        rows = torch.randperm(len(self.x), generator=self.shuffle)[: MICRO * ACCUM]
        return rows.view(ACCUM, MICRO)[self.rank :: self.world]

    def step(self):
        self.optimizer.zero_grad()
        running = torch.zeros(())
        micros = self.window()
        for i, rows in enumerate(micros):
            last = i == len(micros) - 1
            with nullcontext() if last else self.model.no_sync():
                loss = self.criterion(self.model(self.x[rows]), self.y[rows])
                (loss / ACCUM).backward()
            running += loss.detach()
        self.optimizer.step()
        self.scheduler.step()
        dist.all_reduce(running)
        return running.item() / ACCUM

    @torch.no_grad()
    def accuracy(self):
        return (self.model.module(self.x).argmax(1) == self.y).float().mean().item()

    def fit(self):
        for k in range(1, WINDOWS + 1):
            loss = self.step()
            if self.rank == 0 and k % 15 == 0:
                print(f"window {k:3d}  loss {loss:.5f}  lr {self.scheduler.get_last_lr()[0]:.4f}", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    trainer = Trainer()
    trainer.fit()
    if trainer.rank == 0:
        print(f"accuracy {trainer.accuracy():.4f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()
