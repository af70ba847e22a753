# Sum loss under DDP. DDP divides by the number of processes, the learning rate puts it back.
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import make_classification
from torch.nn.parallel import DistributedDataParallel as DDP

BATCH, STEPS, LR = 60, 100, 0.002
os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29808")


class Run:
    def __init__(self):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        x, y = make_classification(1800, n_features=16, n_informative=8, n_classes=4, random_state=12)
        self.x, self.y = torch.tensor(x, dtype=torch.float32), torch.tensor(y)
        torch.manual_seed(44)
        self.net = nn.Sequential(nn.Linear(16, 40), nn.ReLU(), nn.Linear(40, 4))
        self.ddp = DDP(self.net)
        self.opt = torch.optim.SGD(self.ddp.parameters(), lr=LR * self.world, momentum=0.9)
        self.sched = torch.optim.lr_scheduler.LinearLR(self.opt, start_factor=0.2, total_iters=15)
        self.order = torch.Generator().manual_seed(2)

    def share(self):
        """Unequal shares on purpose: a sum does not mind."""
        rows = torch.randperm(len(self.x), generator=self.order)[:BATCH]
        sizes = [BATCH // self.world] * self.world
        if self.world > 1:
            sizes[0] += 5
            sizes[-1] -= 5
        return rows.split(sizes)[self.rank]

    def step(self):
        rows = self.share()
        loss = F.cross_entropy(self.ddp(self.x[rows]), self.y[rows], reduction="sum")
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        self.sched.step()
        loss = loss.detach()
        dist.all_reduce(loss)
        return loss.item() / BATCH


def main():
    dist.init_process_group("gloo")
    run = Run()
    for k in range(1, STEPS + 1):
        loss = run.step()
        if run.rank == 0 and k % 20 == 0:
            print(f"step {k}: loss {loss:.5f}", flush=True)
    with torch.no_grad():
        hits = (run.net(run.x).argmax(1) == run.y).float().mean().item()
    if run.rank == 0:
        print(f"accuracy {hits:.4f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
