import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_wine
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from torch.nn.parallel import DistributedDataParallel as DDP

BATCH = 32
MAX_EPOCHS = 50
PATIENCE = 3


class Stopper:
    def __init__(self, patience, min_delta):
        self.patience, self.min_delta = patience, min_delta
        self.best, self.bad = float("inf"), 0

    def update(self, value):
        if value < self.best - self.min_delta:
            self.best, self.bad = value, 0
        else:
            self.bad += 1
        return self.bad >= self.patience


def get_data():
    x, y = load_wine(return_X_y=True)
    x_tr, x_va, y_tr, y_va = train_test_split(x, y, train_size=128, random_state=4, stratify=y)
    scaler = StandardScaler().fit(x_tr)
    as_x = lambda a: torch.tensor(scaler.transform(a), dtype=torch.float32)
    return as_x(x_tr), torch.tensor(y_tr), as_x(x_va), torch.tensor(y_va)


def main():
    for k, v in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29825")):
        os.environ.setdefault(k, v)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y, x_val, y_val = get_data()
    x_val, y_val = x_val[rank::world], y_val[rank::world]

    torch.manual_seed(6)
    model = DDP(nn.Sequential(nn.Linear(13, 24), nn.ReLU(), nn.Linear(24, 3)))
    opt = torch.optim.SGD(model.parameters(), lr=0.08, momentum=0.9)
    stopper = Stopper(PATIENCE, min_delta=2e-3)
    share = BATCH // world

    for epoch in range(MAX_EPOCHS):
        model.train()
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        for i in range(0, len(x), BATCH):
            rows = order[i + rank * share:i + (rank + 1) * share]
            loss = F.cross_entropy(model(x[rows]), y[rows])
            opt.zero_grad()
            loss.backward()
            opt.step()

        model.eval()
        with torch.no_grad():
            val = F.cross_entropy(model(x_val), y_val, reduction="sum")
        stats = torch.tensor([val.item(), float(len(y_val))])
        val_loss = (stats[0] / stats[1]).item()
        if rank == 0:
            print(f"epoch {epoch} val {val_loss:.5f}")
        if stopper.update(val_loss):
            break

    with torch.no_grad():
        hits = torch.tensor([(model(x_val).argmax(1) == y_val).sum().item(), len(y_val)], dtype=torch.float64)
    dist.all_reduce(hits)
    if rank == 0:
        print(f"stopped after epoch {epoch}, validation accuracy {(hits[0] / hits[1]).item():.4f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
