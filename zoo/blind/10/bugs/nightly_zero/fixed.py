"""Multi-label toy problem, optimizer state spread over the processes, a file every 20 steps."""
import os
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import make_multilabel_classification
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP


def init():
    for key, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29716}.items():
        os.environ.setdefault(key, str(value))
    dist.init_process_group("gloo", timeout=timedelta(seconds=8))


def rows_of(step, total, batch, rank, world):
    g = torch.Generator().manual_seed(1000 + step)
    return torch.randperm(total, generator=g)[:batch].view(-1, world)[:, rank]


class Saver:
    def __init__(self, folder, every):
        self.folder, self.every = Path(folder), every
        self.files = []

    def __call__(self, step, model, opt):
        if step % self.every:
            return
        opt.consolidate_state_dict(to=0)
        if dist.get_rank() == 0:
            path = self.folder / f"step{step:04d}.pt"
            torch.save({"step": step, "model": model.module.state_dict(), "opt": opt.state_dict()}, path)
            self.files.append(path)
            for old in self.files[:-2]:
                old.unlink(missing_ok=True)


def main():
    init()
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = make_multilabel_classification(1500, n_features=20, n_classes=6, random_state=3)
    x = torch.tensor(x, dtype=torch.float32)
    x = (x - x.mean(0)) / x.std(0)
    y = torch.tensor(y, dtype=torch.float32)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 6)))
    opt = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=4e-3, weight_decay=0.02)
    loss_fn = nn.BCEWithLogitsLoss()
    with tempfile.TemporaryDirectory() as folder:
        save = Saver(folder, every=20)
        for step in range(1, 61):
            rows = rows_of(step, len(x), 48, rank, world)
            loss = loss_fn(model(x[rows]), y[rows])
            opt.zero_grad()
            loss.backward()
            opt.step()
            save(step, model, opt)
            if step % 20 == 0:
                with torch.no_grad():
                    whole = loss_fn(model.module(x), y).item()
                if rank == 0:
                    moments = len(torch.load(save.files[-1])["opt"]["state"])
                    print(f"step {step}: loss {whole:.6f}, file with moments of {moments} tensors", flush=True)
        dist.barrier()
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
