"""Tensor-parallel attention by hand: sorting-position prediction with cosine attention.

Heads and MLP columns are dealt over the processes; every process sees the whole
batch.  Attention uses normalised queries and keys with one learned sharpness
for all heads (Swin v2).  With one process it is the plain model.
"""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

DIM, HEADS, FF, LEN, VOCAB = 32, 4, 64, 10, 16


def all_sum(t):
    if dist.is_initialized():
        dist.all_reduce(t)
    return t


class IntoParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return all_sum(g.contiguous().clone())


class OutOfParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return all_sum(x.contiguous().clone())

    @staticmethod
    def backward(ctx, g):
        return g


class Cut:
    """Draws a full matrix and keeps this process's slice of it."""

    def __init__(self, rank, world, seed):
        self.rank, self.world = rank, world
        self.g = torch.Generator().manual_seed(seed)

    def __call__(self, rows, cols, dim=None):
        w = torch.randn(rows, cols, generator=self.g) / cols ** 0.5
        if dim is not None:
            w = w.chunk(self.world, dim)[self.rank].clone()
        return nn.Parameter(w)


class Attention(nn.Module):
    def __init__(self, cut, world):
        super().__init__()
        self.heads = HEADS // world
        self.q, self.k, self.v = cut(DIM, DIM, 0), cut(DIM, DIM, 0), cut(DIM, DIM, 0)
        self.o = cut(DIM, DIM, 1)
        self.sharpness = nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        x = IntoParallel.apply(x)
        n, t, _ = x.shape
        q, k, v = ((x @ w.T).view(n, t, self.heads, -1).transpose(1, 2) for w in (self.q, self.k, self.v))
        sharpness = IntoParallel.apply(self.sharpness).exp()
        score = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-1, -2) * sharpness
        mixed = (score.softmax(-1) @ v).transpose(1, 2).reshape(n, t, -1)
        return OutOfParallel.apply(mixed @ self.o.T)


class FeedForward(nn.Module):
    def __init__(self, cut):
        super().__init__()
        self.up, self.down = cut(FF, DIM, 0), cut(DIM, FF, 1)

    def forward(self, x):
        return OutOfParallel.apply(F.gelu(IntoParallel.apply(x) @ self.up.T) @ self.down.T)


class Sorter(nn.Module):
    def __init__(self, rank, world):
        super().__init__()
        cut = Cut(rank, world, seed=90)
        self.token, self.place = cut(VOCAB, DIM), cut(LEN, DIM)
        self.layers = nn.ModuleList()
        for _ in range(2):
            self.layers.append(Attention(cut, world))
            self.layers.append(FeedForward(cut))
        self.norms = nn.ModuleList([nn.LayerNorm(DIM) for _ in self.layers])
        self.out = cut(LEN, DIM)

    def forward(self, ids):
        h = 3 * self.token[ids] + self.place
        for norm, layer in zip(self.norms, self.layers):
            h = h + layer(norm(h))
        return h @ self.out.T


def batch(size, g):
    ids = torch.rand(size, VOCAB, generator=g).argsort(1)[:, :LEN]
    return ids, ids.argsort(1).argsort(1)


def main():
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    model = Sorter(rank, world)
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    g = torch.Generator().manual_seed(91)
    for step in range(50):
        ids, want = batch(32, g)
        loss = F.cross_entropy(model(ids).flatten(0, 1), want.flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 10 == 9 and rank == 0:
            print(f"step {step + 1} loss {loss.item():.5f}")
    with torch.no_grad():
        ids, want = batch(256, torch.Generator().manual_seed(92))
        out = model(ids)
        nll = F.cross_entropy(out.flatten(0, 1), want.flatten()).item()
    if rank == 0:
        sharp = [round(m.sharpness.exp().item(), 5) for m in model.layers if isinstance(m, Attention)]
        print(f"test nll {nll:.5f} sharpness {sharp}")
    if world > 1:
        time.sleep(0.3)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
