"""ZeroRedundancyOptimizer with two groups, a schedule on its groups and clipping before it."""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import make_classification
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

BATCH, STEPS = 64, 90


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(20, 48)
        self.norm = nn.LayerNorm(48)
        self.mid = nn.Linear(48, 48)
        self.out = nn.Linear(48, 5)

    def forward(self, x):
        h = self.norm(F.relu(self.inp(x)))
        return self.out(F.relu(self.mid(h)))


def groups(model):
    heavy = [p for p in model.parameters() if p.dim() > 1]
    light = [p for p in model.parameters() if p.dim() <= 1]
    return heavy, light


def setup():
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29811")
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def main():
    rank, world = setup()
    x, y = make_classification(2000, n_features=20, n_informative=12, n_classes=5, random_state=7)
    x, y = torch.tensor(x, dtype=torch.float32), torch.tensor(y)
    torch.manual_seed(rank + 1)
    model = DDP(Tagger())
    heavy, light = groups(model)
    opt = ZeroRedundancyOptimizer(heavy, torch.optim.Adam, lr=3e-3, weight_decay=1e-3)
    opt.add_param_group({"params": light, "lr": 3e-3, "weight_decay": 0.0})
    order = torch.Generator().manual_seed(70)
    for step in range(1, STEPS + 1):
        warm = min(1.0, step / 20) * (1 - 0.8 * step / STEPS)
        opt.param_groups[0]["lr"] = 4e-3 * warm
        opt.param_groups[1]["lr"] = 2e-3 * warm
        rows = torch.randint(len(x), (BATCH,), generator=order).view(world, -1)[rank]
        loss = F.cross_entropy(model(x[rows]), y[rows], label_smoothing=0.05)
        model.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.7)
        opt.step()
        if step % 30 == 0:
            with torch.no_grad():
                whole = F.cross_entropy(model.module(x), y).item()
            if rank == 0:
                print(f"step {step}: loss {whole:.5f}, gradient {norm:.4f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
