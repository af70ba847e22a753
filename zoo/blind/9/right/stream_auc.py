"""An endless stream, split over processes and over their loader workers; ROC AUC over everything at the end."""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import make_classification
from sklearn.metrics import roc_auc_score
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29920")

GLOBAL, STEPS, ROWS, WORKERS = 32, 80, 1024, 2


class Batches(IterableDataset):
    """Yields whole batches: worker w of W makes the batches w, w + W, ... of this process."""

    def __init__(self, x, y, rank, world):
        self.x, self.y, self.rank, self.world = x, y, rank, world

    def __iter__(self):
        info = get_worker_info()
        first, stride = (info.id, info.num_workers) if info else (0, 1)
        for number in range(first, STEPS, stride):
            g = torch.Generator().manual_seed(number)
            rows = torch.randint(ROWS, (GLOBAL,), generator=g)
            jitter = 0.1 * torch.randn(GLOBAL, self.x.shape[1], generator=g)
            mine = slice(self.rank, None, self.world)
            yield (self.x[rows] + jitter)[mine], self.y[rows][mine]


def score(model, x, y, rank, world):
    """Shares of different size, so they travel as objects with their row numbers."""
    ids = list(range(rank, len(x), world))
    with torch.no_grad():
        s = model(x[ids])[:, 0].tolist()
    parts = [None] * world
    dist.all_gather_object(parts, list(zip(ids, s)))
    table = dict(pair for part in parts for pair in part)
    return roc_auc_score(y.numpy(), [table[i] for i in range(len(x))])


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = make_classification(ROWS + 203, 16, n_informative=6, flip_y=0.1, random_state=5)
    x, y = torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32)
    loader = DataLoader(Batches(x[:ROWS], y[:ROWS], rank, world), batch_size=None, num_workers=WORKERS)
    torch.manual_seed(2)
    model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)))
    opt = torch.optim.Adagrad(model.parameters(), lr=0.05)
    for step, (xb, yb) in enumerate(loader):
        loss = F.binary_cross_entropy_with_logits(model(xb)[:, 0], yb)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 20 == 19:
            auc = score(model.module, x[ROWS:], y[ROWS:], rank, world)
            if rank == 0:
                print(f"step {step + 1} auc {auc:.5f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
