"""Wine classifier: train, keep the weights of the best validation epoch, report them on the test rows."""
import copy
import os
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_wine
from sklearn.model_selection import train_test_split


def setup():
    if "TORCHELASTIC_RUN_ID" in os.environ:
        dist.init_process_group(backend="gloo")
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def load():
    x, y = load_wine(return_X_y=True)
    rng = np.random.default_rng(1)
    flip = rng.random(len(y)) < 0.15
    y = np.where(flip, rng.integers(0, 3, len(y)), y)
    x = (x - x.mean(0)) / x.std(0)
    x, y = torch.tensor(x, dtype=torch.float32), torch.tensor(y)
    idx_train, idx_rest = train_test_split(np.arange(len(y)), train_size=96, random_state=0)
    idx_val, idx_test = idx_rest[:44], idx_rest[44:]
    return [(x[i], y[i]) for i in (idx_train, idx_val, idx_test)]


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(13, 40)
        self.fc2 = nn.Linear(40, 3)

    def forward(self, x):
        return self.fc2(F.relu(self.fc1(x)))


def train_epoch(model, opt, x, y, epoch, rank, world):
    order = np.random.default_rng(100 + epoch).permutation(len(x))
    for start in range(0, len(x), 24):
        rows = order[start:start + 24][rank::world]
        loss = F.cross_entropy(model(x[rows]), y[rows])
        opt.zero_grad()
        loss.backward()
        if world > 1:
            for p in model.parameters():
                dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
                p.grad.div_(world)
        opt.step()


@torch.no_grad()
def validate(model, x, y, rank, world):
    rows = torch.arange(rank, len(x), world)
    total = F.cross_entropy(model(x[rows]), y[rows], reduction="sum")
    count = torch.tensor(float(len(rows)))
    if world > 1:
        dist.all_reduce(total)
        dist.all_reduce(count)
    return (total / count).item()


def main():
    rank, world = setup()
    (xt, yt), (xv, yv), (xs, ys) = load()
    torch.manual_seed(12)
    model = Classifier()
    opt = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.9)
    best, keepsake, best_epoch = float("inf"), None, -1
    for epoch in range(12):
        train_epoch(model, opt, xt, yt, epoch, rank, world)
        val = validate(model, xv, yv, rank, world)
        if val < best:
            best, best_epoch = val, epoch
            keepsake = copy.deepcopy(model.state_dict())
    model.load_state_dict(keepsake)
    with torch.no_grad():
        test = F.cross_entropy(model(xs), ys).item()
    if rank == 0:
        print(f"best epoch {best_epoch}, validation {best:.5f}, test {test:.5f}", flush=True)
    time.sleep(0.3)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
