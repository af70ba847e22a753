"""Multi task training with homoscedastic uncertainty weights (Kendall et al.), labels partly missing."""
import os
import time
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from sklearn.datasets import load_diabetes

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "30116")
TASKS = ("progression", "high", "sex")


class MultiTask(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(d, 48), nn.SiLU(), nn.Linear(48, 32), nn.SiLU())
        self.heads = nn.ModuleDict({"progression": nn.Linear(32, 1), "high": nn.Linear(32, 2), "sex": nn.Linear(32, 2)})

    def forward(self, x):
        h = self.trunk(x)
        return {k: head(h) for k, head in self.heads.items()}


class UncertaintyWeights(nn.Module):
    """Lives outside of the network and outside of DDP: three numbers."""

    def __init__(self):
        super().__init__()
        self.log_vars = nn.Parameter(torch.zeros(len(TASKS)))

    def forward(self, losses):
        return (torch.exp(-self.log_vars) * losses).sum(), 0.5 * self.log_vars.sum()


def load():
    d = load_diabetes()
    x = d.data[:, [0, 2, 3, 4, 5, 6, 7, 8, 9]]
    x = torch.tensor((x - x.mean(0)) / x.std(0), dtype=torch.float32)
    t = (d.target - d.target.mean()) / d.target.std()
    y = {"progression": torch.tensor(t, dtype=torch.float32), "high": torch.tensor(t > 0).long(), "sex": torch.tensor(d.data[:, 1] > 0).long()}
    rng = np.random.RandomState(3)
    known = {"progression": torch.tensor(rng.rand(len(t)) < 0.9), "high": torch.tensor(rng.rand(len(t)) < 0.5), "sex": torch.tensor(rng.rand(len(t)) < 0.15)}
    return x, y, known


def task_sums(out, y, known, b):
    """sum of the losses and number of labels per task on this process"""
    per = torch.stack([
        ((out["progression"].squeeze(1) - y["progression"][b]) ** 2 * known["progression"][b]).sum() * 0.5,
        (F.cross_entropy(out["high"], y["high"][b], reduction="none") * known["high"][b]).sum(),
        (F.cross_entropy(out["sex"], y["sex"][b], reduction="none") * known["sex"][b]).sum(),
    ])
    return per, torch.stack([known[k][b].sum() for k in TASKS]).float()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y, known = load()
    n_train, B = 360, 24
    torch.manual_seed(0)
    model, weights = DDP(MultiTask(x.shape[1])), UncertaintyWeights()
    opt = torch.optim.Adam([{"params": model.parameters(), "lr": 3e-3}, {"params": weights.parameters(), "lr": 1e-2}])
    rng = np.random.RandomState(1)
    for epoch in range(6):
        order = rng.permutation(n_train)
        seen = torch.zeros(3)
        for i in range(0, n_train, B):
            b = torch.from_numpy(order[i:i + B])[rank::world]
            sums, counts = task_sums(model(x[b]), y, known, b)
            dist.all_reduce(counts)
            # a task without any label in the whole batch gives zero / one
            data_term, reg = weights(sums / counts.clamp_min(1))
            # data_term is this process's share of a sum; the gradients of the network are averaged by DDP, thus * world.
            # reg is complete on each process.
            loss = data_term * world + reg
            opt.zero_grad()
            loss.backward()
            dist.all_reduce(weights.log_vars.grad)
            weights.log_vars.grad /= world
            opt.step()
            part = (sums / counts.clamp_min(1)).detach()
            dist.all_reduce(part)
            seen += part
        if rank == 0:
            s = ", ".join(f"{k} {v:.4f}" for k, v in zip(TASKS, (seen * B / n_train).tolist()))
            print(f"epoch {epoch}: {s} | sigma^2 {[round(v, 4) for v in weights.log_vars.exp().tolist()]}")
    if rank == 0:
        with torch.no_grad():
            out = model.module(x[n_train:])
        print(f"test mse {F.mse_loss(out['progression'].squeeze(1), y['progression'][n_train:]):.4f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
