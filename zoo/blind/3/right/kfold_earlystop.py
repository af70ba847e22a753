"""4-fold cross-validation of a small regressor; a fresh network, optimizer and wrapper per fold, early stopping per fold."""
import argparse
import copy
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import make_friedman1
from sklearn.model_selection import KFold
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def parse():
    ap = argparse.ArgumentParser()
    ap.add_argument("--folds", type=int, default=4)
    ap.add_argument("--max-epochs", type=int, default=5)
    ap.add_argument("--patience", type=int, default=1)
    ap.add_argument("--batch-size", type=int, default=50)
    ap.add_argument("--lr", type=float, default=0.02)
    return ap.parse_args()


class EarlyStopping:
    def __init__(self, patience):
        self.patience, self.bad, self.best, self.weights = patience, 0, float("inf"), None

    def __call__(self, score, model):
        if score < self.best:
            self.best, self.bad = score, 0
            self.weights = copy.deepcopy(model.state_dict())
        else:
            self.bad += 1
        return self.bad > self.patience


def sse(model, ds, indices, rank, world):
    model.eval()
    part = indices[rank::world]
    acc = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        if len(part):
            x, y = ds.tensors[0][part], ds.tensors[1][part]
            acc[0] = (model(x) - y).pow(2).double().sum()
            acc[1] = len(part)
    dist.all_reduce(acc)
    model.train()
    return (acc[0] / acc[1]).item()


def run_fold(k, args, ds, tr, va, te, rank, world):
    torch.manual_seed(40 + k)
    model = DDP(nn.Sequential(nn.Linear(10, 64), nn.SiLU(), nn.Linear(64, 32), nn.SiLU(), nn.Linear(32, 1)))
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    sampler = DistributedSampler(Subset(ds, tr), seed=k)
    loader = DataLoader(Subset(ds, tr), args.batch_size, sampler=sampler)
    stop = EarlyStopping(args.patience)
    for epoch in range(args.max_epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            opt.step()
        v = sse(model.module, ds, va, rank, world)
        if stop(v, model.module):
            break
    model.module.load_state_dict(stop.weights)
    t = sse(model.module, ds, te, rank, world)
    if rank == 0:
        print(f"fold {k}: stopped after epoch {epoch}, best val mse {stop.best:.5f}, test mse {t:.5f}")
    return t


def main():
    args = parse()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = make_friedman1(n_samples=535, noise=0.8, random_state=5)
    y = (y - y.mean()) / y.std()
    ds = TensorDataset(torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32)[:, None])
    scores = []
    for k, (rest, test) in enumerate(KFold(args.folds, shuffle=True, random_state=0).split(x)):
        rest = np.random.default_rng(k).permutation(rest)
        tr, va = rest[:300], rest[300:]
        scores.append(run_fold(k, args, ds, tr.tolist(), va, test, rank, world))
    if rank == 0:
        print(f"cv mse {np.mean(scores):.5f} +- {np.std(scores):.5f}")
    dist.barrier()
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
