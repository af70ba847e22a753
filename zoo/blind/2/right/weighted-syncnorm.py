"""Imbalanced digits: class-weighted sampling, normalisation over the global batch, macro F1."""
import argparse
import math
import time

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dnn
from sklearn.datasets import load_digits
from sklearn.metrics import f1_score
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Sampler, Subset, TensorDataset


class DistributedWeightedSampler(Sampler):
    def __init__(self, weights, num_samples, rank, world, seed=0):
        self.weights = torch.as_tensor(weights, dtype=torch.double)
        self.total = num_samples // world * world
        self.rank, self.world, self.seed, self.epoch = rank, world, seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.total // self.world

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        draw = torch.multinomial(self.weights, self.total, replacement=True, generator=g)
        return iter(draw[self.rank::self.world].tolist())


class CrossReplicaNorm(nn.Module):
    def __init__(self, c, momentum=0.1, eps=1e-5):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(c)), nn.Parameter(torch.zeros(c))
        self.register_buffer("mean", torch.zeros(c))
        self.register_buffer("var", torch.ones(c))
        self.momentum, self.eps = momentum, eps

    def forward(self, x):
        dims = [0] + list(range(2, x.dim()))
        if self.training:
            n = torch.tensor([x.numel() / x.shape[1]])
            stats = torch.cat([x.sum(dims), x.square().sum(dims), n])
            if dist.get_world_size() > 1:
                stats = dnn.all_reduce(stats)
            s, q, n = stats[:-1].chunk(2) + (stats[-1],)
            mean = s / n
            var = q / n - mean.square()
            with torch.no_grad():
                self.mean.lerp_(mean, self.momentum)
                self.var.lerp_(var * n / (n - 1), self.momentum)
        else:
            mean, var = self.mean, self.var
        shape = [1, -1] + [1] * (x.dim() - 2)
        scale = self.weight * (var + self.eps).rsqrt()
        return x * scale.view(shape) + (self.bias - mean * scale).view(shape)


def evaluate(model, ds, rank, world):
    model.eval()
    mine = list(range(rank, len(ds), world))
    found = []
    with torch.no_grad():
        for k, (x, y) in enumerate(DataLoader(Subset(ds, mine), 64)):
            pred = model(x).argmax(1)
            found += zip(mine[64 * k:64 * k + 64], pred.tolist(), y.tolist())
    every = [None] * world if rank == 0 else None
    dist.gather_object(found, every, dst=0)
    model.train()
    if rank == 0:
        table = sorted(sum(every, []))
        assert [t[0] for t in table] == list(range(len(ds)))
        return f1_score([t[2] for t in table], [t[1] for t in table], average="macro")


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch-size", type=int, default=24)
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--lr", type=float, default=0.02, help="reference rate for one process")
    ap.add_argument("--ref-batch", type=int, default=24)
    ap.add_argument("--warmup", type=int, default=6)
    a = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(y)
    train_x, train_y = x[:1200], y[:1200]
    keep = (train_y < 5) | (torch.arange(1200) % 4 == 0)
    train, test = TensorDataset(train_x[keep], train_y[keep]), TensorDataset(x[1200:], y[1200:])
    freq = torch.bincount(train.tensors[1], minlength=10)
    sampler = DistributedWeightedSampler(1.0 / freq[train.tensors[1]], len(train), rank, world)
    loader = DataLoader(train, a.batch_size, sampler=sampler, drop_last=True)

    torch.manual_seed(rank)
    model = DDP(nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), CrossReplicaNorm(12), nn.ReLU(), nn.MaxPool2d(2),
                              nn.Conv2d(12, 20, 3, padding=1), CrossReplicaNorm(20), nn.ReLU(),
                              nn.Flatten(), nn.Linear(20 * 16, 10)))
    peak = a.lr * math.sqrt(a.batch_size * world / a.ref_batch)
    opt = torch.optim.SGD(model.parameters(), lr=peak, momentum=0.9, nesterov=True)
    total = a.epochs * len(loader)
    floor = 0.05
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / a.warmup) * max(floor, 1 - s / total))
    for epoch in range(a.epochs):
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            loss = nn.functional.cross_entropy(model(xb), yb, label_smoothing=0.05)
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
        f1 = evaluate(model.module, test, rank, world)
        if rank == 0:
            print(f"epoch {epoch} lr {sched.get_last_lr()[0]:.5f} macro-F1 {f1:.4f}")


if __name__ == "__main__":
    main()
    time.sleep(0.3)
    dist.destroy_process_group()
