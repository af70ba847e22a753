"""Denoising transformer for short signals, tensor parallel inside the blocks and split along time between them."""
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

TIME, FEATURES, DIM, HEADS, LAYERS = 16, 3, 32, 4, 2
BATCH, STEPS = 24, 40
RANK = int(os.environ.get("RANK", 0))
WORLD = int(os.environ.get("WORLD_SIZE", 1))


def all_gather_time(x):
    if WORLD == 1:
        return x
    parts = [torch.empty_like(x) for _ in range(WORLD)]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, dim=1)


def reduce_scatter_time(x):
    if WORLD == 1:
        return x
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x)
    return x.chunk(WORLD, dim=1)[RANK].contiguous()


class GatherTime(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return all_gather_time(x)

    @staticmethod
    def backward(ctx, grad):
        return reduce_scatter_time(grad)


class ScatterTime(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return reduce_scatter_time(x)

    @staticmethod
    def backward(ctx, grad):
        return all_gather_time(grad)


def replicated(module):
    for p in module.parameters():
        p.sum_over_ranks = True
    return module


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        hidden = 4 * DIM
        self.norm1 = replicated(nn.LayerNorm(DIM))
        self.norm2 = replicated(nn.LayerNorm(DIM))
        scale = 1 / math.sqrt(DIM)
        self.qkv = self.shard(torch.randn(3, HEADS, DIM // HEADS, DIM) * scale, 1)
        self.out = self.shard(torch.randn(DIM, HEADS, DIM // HEADS) * scale, 1)
        self.up = self.shard(torch.randn(hidden, DIM) * scale, 0)
        self.down = self.shard(torch.randn(DIM, hidden) / math.sqrt(hidden), 1)

    @staticmethod
    def shard(full, dim):
        return nn.Parameter(full.chunk(WORLD, dim=dim)[RANK].clone())

    def forward(self, x):
        h = GatherTime.apply(self.norm1(x))
        q, k, v = torch.einsum("btd,chkd->cbhtk", h, self.qkv)
        att = F.scaled_dot_product_attention(q, k, v)
        x = x + ScatterTime.apply(torch.einsum("bhtk,dhk->btd", att, self.out))
        h = F.gelu(GatherTime.apply(self.norm2(x)) @ self.up.T)
        return x + ScatterTime.apply(h @ self.down.T)


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = replicated(nn.Linear(FEATURES, DIM))
        self.pos = replicated(nn.Embedding(TIME, DIM))
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = replicated(nn.LayerNorm(DIM))
        self.head = replicated(nn.Linear(DIM, FEATURES))

    def forward(self, x):
        where = torch.arange(TIME).chunk(WORLD)[RANK]
        x = self.inp(x) + self.pos(where)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def signals(step):
    gen = torch.Generator().manual_seed(500 + step)
    t = torch.arange(TIME) / TIME
    freq = 1 + 2 * torch.rand(BATCH, 1, FEATURES, generator=gen)
    phase = 2 * math.pi * torch.rand(BATCH, 1, FEATURES, generator=gen)
    clean = torch.sin(2 * math.pi * freq * t.view(1, -1, 1) + phase)
    return clean + 0.5 * torch.randn(clean.shape, generator=gen), clean


def main():
    torch.set_default_dtype(torch.float64)
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(21)
    model = Denoiser()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    for step in range(STEPS):
        noisy, clean = (z.chunk(WORLD, dim=1)[RANK] for z in signals(step))
        loss = F.mse_loss(model(noisy), clean, reduction="sum") / (BATCH * TIME * FEATURES)
        optimizer.zero_grad()
        loss.backward()
        if WORLD > 1:
            for p in model.parameters():
                if getattr(p, "sum_over_ranks", False):
                    dist.all_reduce(p.grad)
        optimizer.step()
        total = loss.detach().clone()
        if WORLD > 1:
            dist.all_reduce(total)
        if RANK == 0 and step % 10 == 9:
            print(f"step {step + 1} mse {total.item():.10f}")

    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
