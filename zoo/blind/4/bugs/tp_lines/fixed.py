"""Which module of the standard library is this line from?  Residual MLP over hashed trigrams, tensor parallel."""
import argparse
import inspect
import pickle
import tarfile
import textwrap
import time
import typing
import zlib

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

SOURCES = (argparse, inspect, tarfile, textwrap, pickle, typing)


class Enter(torch.autograd.Function):
    """Identity on the way in, sum over processes on the way back."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        dist.all_reduce(g)
        return g


class Leave(torch.autograd.Function):
    """Sum over processes on the way out, identity on the way back."""

    @staticmethod
    def forward(ctx, x):
        x = x.contiguous().clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g


def part(full, dim):
    return nn.Parameter(full.chunk(dist.get_world_size(), dim)[dist.get_rank()].clone())


class ColumnLinear(nn.Module):
    def __init__(self, n_in, n_out):
        super().__init__()
        self.weight = part(torch.randn(n_out, n_in) * n_in ** -0.5, 0)
        self.bias = part(torch.zeros(n_out), 0)

    def forward(self, x):
        return F.linear(Enter.apply(x), self.weight, self.bias)


class RowLinear(nn.Module):
    def __init__(self, n_in, n_out):
        super().__init__()
        self.weight = part(torch.randn(n_out, n_in) * n_in ** -0.5, 1)
        self.bias = nn.Parameter(torch.zeros(n_out))

    def forward(self, x):
        return Leave.apply(F.linear(x, self.weight)) + self.bias


class ResidualMLP(nn.Module):
    def __init__(self, n_in, dim, hidden, depth, classes):
        super().__init__()
        self.inp = nn.Linear(n_in, dim)
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(depth))
        self.ups = nn.ModuleList(ColumnLinear(dim, hidden) for _ in range(depth))
        self.downs = nn.ModuleList(RowLinear(hidden, dim) for _ in range(depth))
        self.cls = nn.Linear(dim, classes)

    def forward(self, x):
        x = self.inp(x)
        for norm, up, down in zip(self.norms, self.ups, self.downs):
            x = x + down(F.gelu(up(norm(x))))
        return self.cls(x)


def load_lines(width):
    rows, targets = [], []
    for label, module in enumerate(SOURCES):
        lines = [ln.strip() for ln in inspect.getsource(module).splitlines() if len(ln.strip()) > 20][:300]
        for line in lines:
            v = torch.zeros(width)
            for i in range(len(line) - 2):
                v[zlib.crc32(line[i:i + 3].encode()) % width] += 1
            rows.append(v / v.norm())
            targets.append(label)
    return torch.stack(rows), torch.tensor(targets)


def run(opts):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(opts.seed)
    model = ResidualMLP(opts.width, 32, 64, 2, len(SOURCES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=opts.lr, weight_decay=0.01)
    feats, labels = load_lines(opts.width)
    shuffle = torch.Generator().manual_seed(opts.seed + 1)
    perm = torch.randperm(len(feats), generator=shuffle)
    held, train = perm[:300], perm[300:]
    for step in range(opts.steps):
        pick = train[torch.randint(len(train), (opts.batch,), generator=shuffle)]
        loss = F.cross_entropy(model(feats[pick]), labels[pick])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0 and dist.get_rank() == 0:
            print(f"{step:4d} {loss.item():.4f}", flush=True)
    with torch.no_grad():
        acc = (model(feats[held]).argmax(1) == labels[held]).float().mean()
    if dist.get_rank() == 0:
        print(f"held-out accuracy {acc.item():.3f}")
    dist.barrier()
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=40)
    p.add_argument("--batch", type=int, default=96)
    p.add_argument("--width", type=int, default=256)
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--seed", type=int, default=5)
    run(p.parse_args())
