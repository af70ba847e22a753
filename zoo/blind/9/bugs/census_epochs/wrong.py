"""Plain loop without a DataLoader: every process takes its stride of the epoch's permutation."""
import datetime
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import make_classification
from sklearn.model_selection import train_test_split
from torch.nn.parallel import DistributedDataParallel as DDP

EPOCHS = 5
GLOBAL_BATCH = 64


def get_data():
    x, y = make_classification(1281, 20, n_informative=10, n_classes=3, class_sep=0.8, random_state=7)
    xa, xb, ya, yb = train_test_split(x, y, test_size=256, random_state=7, stratify=y)
    as_x = lambda a: torch.tensor(a, dtype=torch.float32)
    return as_x(xa), torch.tensor(ya), as_x(xb), torch.tensor(yb)


def main():
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "30458")
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=15))
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y, x_test, y_test = get_data()
    batch = GLOBAL_BATCH // world

    torch.manual_seed(50)
    model = DDP(nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 3)))
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sched = torch.optim.lr_scheduler.StepLR(opt, step_size=2, gamma=0.5)

    for epoch in range(EPOCHS):
        perm = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        mine = perm[rank::world]
        loss_sum, seen = 0.0, 0
        for rows in mine.split(batch):
            loss = F.cross_entropy(model(x[rows]), y[rows])
            opt.zero_grad()
            loss.backward()
            opt.step()
            loss_sum += loss.item() * len(rows)
            seen += len(rows)
        sched.step()
        if rank == 0:
            print(f"epoch {epoch} lr {sched.get_last_lr()[0]:.4f} steps {len(mine.split(batch))}")

    totals = torch.tensor([loss_sum, float(seen)], dtype=torch.float64)
    dist.all_reduce(totals)
    with torch.no_grad():
        out = model.module(x_test)
    if rank == 0:
        print(f"last epoch {totals[0] / totals[1]:.5f} test loss {F.cross_entropy(out, y_test).item():.5f} "
              f"accuracy {(out.argmax(1) == y_test).float().mean().item():.4f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
