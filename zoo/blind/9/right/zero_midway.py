"""ZeroRedundancyOptimizer, stopped in the middle of an epoch and taken up again from a file."""
import os
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

EPOCHS, GLOBAL = 3, 64
ROWS = 1536
PER_EPOCH = ROWS // GLOBAL


def init():
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29958")
    dist.init_process_group("gloo")


class Job:
    def __init__(self, seed):
        torch.manual_seed(seed)
        self.model = DDP(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
        self.opt = ZeroRedundancyOptimizer(self.model.parameters(), optimizer_class=torch.optim.Adam, lr=4e-3)
        self.sched = torch.optim.lr_scheduler.ExponentialLR(self.opt, gamma=0.98)
        self.step = 0

    def save(self, path):
        self.opt.consolidate_state_dict(to=0)
        if dist.get_rank() == 0:
            torch.save(dict(model=self.model.module.state_dict(), opt=self.opt.state_dict(),
                            sched=self.sched.state_dict(), step=self.step), path)
        dist.barrier()

    def load(self, path):
        saved = torch.load(path, weights_only=False)
        self.model.module.load_state_dict(saved["model"])
        self.opt.load_state_dict(saved["opt"])
        self.sched.load_state_dict(saved["sched"])
        self.step = saved["step"]

    def run(self, x, y, until):
        rank, world = dist.get_rank(), dist.get_world_size()
        while self.step < until:
            epoch, place = divmod(self.step, PER_EPOCH)
            perm = torch.randperm(ROWS, generator=torch.Generator().manual_seed(epoch))
            rows = perm[place * GLOBAL:(place + 1) * GLOBAL][rank::world]
            self.opt.zero_grad()
            F.cross_entropy(self.model(x[rows]), y[rows]).backward()
            self.opt.step()
            self.sched.step()
            self.step += 1
        with torch.no_grad():
            loss = F.cross_entropy(self.model.module(x[ROWS:]), y[ROWS:]).item()
        if rank == 0:
            print(f"step {self.step} lr {self.sched.get_last_lr()[0]:.6f} test {loss:.5f}")


def main():
    init()
    d = load_digits()
    x, y = torch.tensor(d.data, dtype=torch.float32) / 16, torch.tensor(d.target)
    where = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(where, src=0)
    path = Path(where[0]) / "state.pt"

    first = Job(seed=3)
    first.run(x, y, until=PER_EPOCH + 10)
    first.save(path)

    second = Job(seed=4 + dist.get_rank())
    second.load(path)
    second.run(x, y, until=EPOCHS * PER_EPOCH)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
